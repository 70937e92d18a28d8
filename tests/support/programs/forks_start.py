"""What programs of tests/system/test_forks.py begin with."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

from starting import count

import holdfast.multihost as multihost

warnings.simplefilter("ignore")  # jax's about fork


def fork(work):
    child = os.fork()
    if not child:
        work()
        sys.exit(0)  # with all that runs at an interpreter's end
    return child


def reap(child, within_s=30):
    end_s = time.monotonic() + within_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end_s:
            os.kill(child, signal.SIGABRT)  # faulthandler prints where it is
            raise AssertionError("the child hangs")
        time.sleep(0.01)


def unharmed(processes=count):
    statistics = multihost.current_client().statistics()
    assert (statistics["breaks"], statistics["reconnects"]) == (0, 0), statistics
    assert [info.state for info in multihost.current_client().process_info()] == [
        "CONNECTED"
    ] * processes
    multihost.sync_global_processes("unharmed", timeout=60)

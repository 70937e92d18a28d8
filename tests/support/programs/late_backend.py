"""Process 1 does not bring its backend up. argv: index, count, address, time-out, what it does."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

from holdfast import multihost
from holdfast.coordination import ProcessLost
from holdfast.multihost import StartupTimeout
from holdfast.multihost.start import start
from holdfast.multihost.start.jax_agent import start_jax

index, count = map(int, sys.argv[1:3])
address = sys.argv[3]
timeout_s = float(sys.argv[4])
what = sys.argv[5]
logging.basicConfig(format="%(levelname)s %(message)s")


def between(*arguments: Any, **options: Any) -> None:
    if index == 1 and what == "dies":
        os.kill(os.getpid(), 9)
    if index == 1 and what == "fails":
        raise OSError("no accelerator")
    if index == 1:
        threading.Event().wait(20)
        os._exit(0)
    start_jax(*arguments, **options)


vars(start)["start_jax"] = between
begun_s = time.monotonic()
try:
    multihost.initialize(address, count, index, timeout_s=timeout_s, heartbeat_timeout_s=60)
except (ProcessLost, StartupTimeout) as error:
    who = error.process if isinstance(error, ProcessLost) else error.processes
    in_time = time.monotonic() - begun_s < timeout_s + 5
    print(f"ended {type(error).__name__} {who} in time {in_time} {error}", flush=True)
assert not multihost.is_initialized()

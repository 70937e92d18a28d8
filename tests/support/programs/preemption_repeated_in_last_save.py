"""SIGTERM comes again and again while shutdown() waits for the last save."""

from __future__ import annotations

import os
import signal
import time

from preemption_start import address, count, index

from holdfast import multihost
from holdfast.multihost.group.group import settle_before_leaving


def settle(timeout_s: float) -> None:
    for _ in range(10):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


multihost.initialize(address, count, index, preemption_sources=[multihost.Signals(repeat_s=0.5)])
settle_before_leaving(settle)
multihost.shutdown()

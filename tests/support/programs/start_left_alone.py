"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from starting import count, index

import holdfast.multihost as multihost


class Cycle:
    """Says so where a search for cycles finds it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self, write: Callable[[int, bytes], int] = os.write) -> None:
        write(1, b"searched\n")


cycle = Cycle()
multihost.initialize(sys.argv[3], count, index, timeout_s=60, heartbeat_timeout_s=60)
multihost.sync_global_processes("here")
if sys.argv[4] == "death" and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[5] == "calls":
    multihost.shutdown()

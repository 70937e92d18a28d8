"""A clock that stands still while this process does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from ..storage.threads import Latch, start_thread

LOOK_S = 0.25
STOOD_S = 2.0  # a busy host lets a thread wait for less


class RunningClock:
    """Returns seconds in which this process ran. Thread-safe.

    A process may be stopped, or its virtual machine moved. Its peers are not to blame for what was
    late meanwhile. A thread looks at the clock every LOOK_S, from `start` on until `stop`. Where
    nobody has looked for STOOD_S, the process stood still.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s = clock()
        self._stood_s = 0.0
        self._standstills = 0
        self._stopped = Latch()

    def __call__(self) -> float:
        with self._lock:
            now_s = self._clock()
            gap_s = now_s - self._looked_s
            self._looked_s = now_s
            if gap_s > STOOD_S:
                self._stood_s += gap_s
                self._standstills += 1
            return now_s - self._stood_s

    def standstills(self) -> int:
        """Returns how often this process has stood still."""
        self()
        with self._lock:
            return self._standstills

    def start(self) -> None:
        """Begins to look."""
        self()
        with contextlib.suppress(RuntimeError):  # an interpreter that ends starts none
            start_thread(self._look)

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self()

    def stop(self) -> None:
        """Ends the thread. Called once."""
        self._stopped.set()

"""The clock of the process that lives are lived in. Imports nothing that reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Time goes on by `true_s` where a life says so. What the processes read may be set ahead or
    back beside it, by `skew_s`; `times_set` counts how often.
    """

    def __init__(self) -> None:
        self.true_s = 0.0
        self.skew_s = 0.0
        self.times_set = 0

    def reset(self) -> None:
        """Begins another life."""
        self.true_s = 0.0
        self.skew_s = 0.0
        self.times_set = 0


CLOCK = Clock()


def install() -> None:
    """Has the whole process read CLOCK as Unix time. Before holdfast is imported, which keeps the
    function in defaults.
    """
    real: Callable[[], float] = time.time
    time.time = lambda: real() + CLOCK.true_s + CLOCK.skew_s


def watch_policies() -> None:
    """Has save and keep policies read CLOCK too. Deadlines keep the machine's own clock."""
    from holdfast.checkpoint.scheduling import scheduler
    from holdfast.checkpoint.storage import steady_time

    class Shifted:
        time = staticmethod(time.time)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + CLOCK.true_s

        @staticmethod
        def clock_gettime(clock: int) -> float:
            return time.clock_gettime(clock) + CLOCK.true_s

    scheduler.time = Shifted  # type: ignore[assignment]
    steady_time.time = Shifted  # type: ignore[assignment]

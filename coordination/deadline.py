"""One time budget for one call: made where the call enters and passed down to all that waits."""

from __future__ import annotations

import math
import threading
import time


class Deadline:
    """The moment at which a call's time is over, on the monotonic clock. Immutable; safe from
    several threads.

    Make one at the edge of a public call and pass it on: each wait inside takes `remaining_s()`
    instead of a time-out of its own.
    """

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        if timeout_s is None or math.isnan(timeout_s):  # callers without a type checker
            raise ValueError(f"a timeout of {timeout_s}: expected a number of seconds")
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Returns the seconds left, never below zero, and no more than a thread can wait for."""
        return min(max(0.0, self.at - time.monotonic()), threading.TIMEOUT_MAX)

    def remaining_ms(self) -> int:
        """Returns the whole milliseconds left, never below 1: on a wire 0 often means for ever."""
        return max(1, int(self.remaining_s() * 1000))

    def passed(self) -> bool:
        """Returns whether the time is over."""
        return time.monotonic() >= self.at

    def elapsed_s(self) -> float:
        """Returns the seconds since the deadline was made."""
        return time.monotonic() - (self.at - self.timeout_s)

    def __repr__(self) -> str:
        return f"Deadline({self.remaining_s():.3f} s of {self.timeout_s:.3f} s left)"

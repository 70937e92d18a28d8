"""Unix time that does not jump: the clock is read once, and time goes on from there."""

from __future__ import annotations

import time

# Time goes on while a machine sleeps, on macOS by the monotonic clock.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SteadyClock:
    """Unix time as the clock had it when this was made, and since then as time went on: what is
    measured by it never jumps.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.clock_gettime(_STEADY)

    def now_s(self) -> float:
        """Returns Unix time."""
        return self._offset_s + time.clock_gettime(_STEADY)


PROCESS_CLOCK = SteadyClock()

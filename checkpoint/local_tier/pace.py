"""Keeps copying to a rate, so that it leaves the network and the disks to others."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Lets at most `rate_bytes_s` go, on the average since it last stood idle. For one thread."""

    def __init__(
        self,
        rate_bytes_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()  # when what went before is paid for

    def take(self, nbytes: int) -> None:
        """Waits until so many bytes more may go."""
        now = self._clock()
        if self._free_s > now:
            self._sleep(self._free_s - now)
        self._free_s = max(self._free_s, now) + nbytes / self._rate_bytes_s

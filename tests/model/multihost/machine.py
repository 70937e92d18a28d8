"""Whether the machine let this program run. What a life says of one that stood still is void."""

from __future__ import annotations

import threading
import time
from typing import Self

LATE_S = 0.4  # a tenth of the heartbeat timeout
_TICK_S = 0.02


class Ticker:
    """Measures by how much a thread that naps wakes too late at most. A context manager."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def _tick(self) -> None:
        while not self._over.is_set():
            due_s = time.monotonic() + _TICK_S
            self._over.wait(_TICK_S)
            self.late_s = max(self.late_s, time.monotonic() - due_s)

    @property
    def stood_still(self) -> bool:
        """Whether the program stood still for so long that its clients may have been given up."""
        return self.late_s > LATE_S

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

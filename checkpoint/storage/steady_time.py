"""Unix time that does not jump: the clock is read once, when the process begins."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def steady_time_s() -> float:
    """Returns Unix time as the clock had it when the process began, and since then by the monotonic
    clock: what is measured within one process never jumps.
    """
    return _OFFSET_S + time.monotonic()

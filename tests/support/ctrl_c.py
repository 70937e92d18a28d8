"""Ctrl-C at a chosen moment of a call, within the limit that pytest has on its test."""

from __future__ import annotations

import signal
from collections.abc import Callable


def is_interrupted(after_s: float, call: Callable[[], object]) -> bool:
    """Makes a call, and interrupts it `after_s` seconds after it began; returns whether it ended
    by that. None comes later than this function returns.
    """
    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    left_s = 0.0
    try:
        try:
            left_s, _ = signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, left_s)
    return False

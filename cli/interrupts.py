"""Ctrl-C from the first line of the command on: exit code 130, and no traceback.

While modules are imported nothing has begun that would have to be undone, and an exception may be
lost in one of them: the process ends at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def end_at_interrupts() -> None:
    """Has Ctrl-C end the process at once. What is ignored (as in a background job) stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupts() -> None:
    """Has Ctrl-C raise KeyboardInterrupt again, which the command minds from here on."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)

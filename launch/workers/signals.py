"""The launcher's own signals while it supervises: the one place where launch sets a handler."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def passing_on(forward: Callable[[int], None], *more: int) -> Iterator[None]:
    """Calls `forward(number)` for SIGTERM, SIGINT, SIGHUP and `more` inside the block.

    Outside the main thread it does nothing: Python takes handlers there alone. A signal that is
    ignored stays so: SIGHUP under nohup, and SIGINT in a script's background job, where a Ctrl-C
    is for another program. `forward` runs in a signal handler: it may only do what is safe there,
    such as putting on a SimpleQueue.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        forward(number)

    taken = [
        number for number in (*_PASSED_ON, *more) if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in taken}
    # Who started this process may have blocked them.
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)

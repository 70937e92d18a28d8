"""Work on a thread of its own, which an interpreter that exits does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_daemon(name: str, work: Callable[..., object], *given: object) -> threading.Thread:
    """Starts `work` on a daemon thread, and returns the thread."""
    thread = threading.Thread(target=work, args=given, name=f"holdfast-{name}", daemon=True)
    thread.start()
    return thread


def on_thread(name: str, compute: Callable[[], T]) -> Future[T]:
    """Runs `compute` on a daemon thread; what it returns or raises is the future's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    start_daemon(name, run)
    return future

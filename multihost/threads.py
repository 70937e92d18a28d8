"""Work on a thread of its own, which an interpreter that exits does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def on_thread(name: str, compute: Callable[[], T]) -> Future[T]:
    """Runs `compute` on a daemon thread; what it returns or raises is the future's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"holdfast-{name}", daemon=True).start()
    return future

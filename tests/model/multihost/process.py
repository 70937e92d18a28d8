"""Processes of one job that are threads of this program, each with a job of its own.

holdfast keeps one global, the job of its process, and asks jax which process it is. Here both
answer for the thread that asks. A thread belongs to the process whose thread has made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from holdfast.multihost import job as job_module
from holdfast.multihost.job import Job

T = TypeVar("T")


class Place:
    """Which process of the job a thread belongs to. `index` is the runtime index."""

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.job = Job()

    def run(self, call: Callable[[], None]) -> threading.Thread:
        """Starts a thread of this process."""
        thread = threading.Thread(target=call, name=f"process-{self.index}", daemon=True)
        vars(thread)["place"] = self
        thread.start()
        return thread


_NOWHERE = Place(0, 1)
"""Of this program's other threads."""


def here() -> Place:
    """Returns the process of the thread that asks."""
    place: Place = vars(threading.current_thread()).get("place", _NOWHERE)
    return place


class _JobHere:
    """Stands for the one global: the job of the process that asks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(here().job, name)


def install() -> None:
    """Has threads be processes, for the whole of this program."""
    begin = threading.Thread.__init__

    def begin_here(thread: threading.Thread, *arguments: Any, **options: Any) -> None:
        begin(thread, *arguments, **options)
        vars(thread)["place"] = here()

    threading.Thread.__init__ = begin_here  # type: ignore[method-assign]
    job_module._job = _JobHere()  # type: ignore[assignment]
    jax.process_index = lambda: here().index
    jax.process_count = lambda: here().count

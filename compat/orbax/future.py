"""`orbax.checkpoint.future`: the ends of work in the background, which handlers return."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from holdfast.coordination.deadline import Deadline


class Future(Protocol):
    """What handlers return: `result` blocks until the work is done, and raises its error."""

    def result(self, timeout: float | None = None) -> Any:
        """Blocks for at most `timeout` seconds."""
        ...


class NoopFuture:
    """The end of no work."""

    def result(self, timeout: float | None = None) -> Any:
        """Returns None."""
        return None

    def cancel(self) -> None:
        """Does nothing."""


class ChainedFuture:
    """The end of several; `cb` is called after them, by each `result`."""

    def __init__(self, futures: Sequence[Future], cb: Callable[[], None]) -> None:
        self._futures = futures
        self._callback = cb

    def result(self, timeout: float | None = None) -> Any:
        """Blocks until all are done, for at most `timeout` seconds together."""
        deadline = None if timeout is None else Deadline(timeout)
        for each in self._futures:
            each.result(None if deadline is None else deadline.remaining_s())
        self._callback()

    def cancel(self) -> None:
        """Cancels those that can be."""
        for each in self._futures:
            getattr(each, "cancel", lambda: None)()


class CommitFutureAwaitingContractedSignals:
    """The end of a coroutine, which is begun at once, on a thread of its own.

    The other options have no effect: there are no signals between handlers here.
    """

    def __init__(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, **options: Any
    ) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix=name or "holdfast-handler")
        self._future = pool.submit(contextvars.copy_context().run, asyncio.run, coro)
        pool.shutdown(wait=False)

    def result(self, timeout: float | None = None) -> Any:
        """Blocks until the coroutine has ended; raises its error."""
        return self._future.result(timeout)

    def cancel(self) -> None:
        """Does nothing: what was begun ends."""

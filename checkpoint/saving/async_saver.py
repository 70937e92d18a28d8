"""The save in flight: at most one, on a thread of its own, and its result for the next call."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.coordination import HoldfastError

from ..errors import SaveFailed
from .commit import RESULT_WAIT_S
from .protocol import SaveResult
from .save import SaveContext, run_save
from .stager import SaveRequest


class AsyncSaver:
    """Runs the saves of a manager, one after the other. For one thread at a time."""

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._request: SaveRequest | None = None
        self._result: Future[SaveResult] = Future()  # of the last request
        self._unread = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def start(self, request: SaveRequest) -> None:
        """Begins a save; the one before has ended. One thread serves all: to start one would hold the caller until it runs.

        An interrupt (Ctrl-C) at any moment leaves either no save, or one that runs: what later calls wait for is noted last.
        """
        result: Future[SaveResult] = Future()
        if self._queue is None:
            queued: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(queued,), name="holdfast-save", daemon=True).start()
            self._queue = queued
        self._queue.put(functools.partial(_run, request, self._context, result))
        self._request, self._result, self._unread = request, result, True

    def close(self) -> None:
        """Lets the thread end, after the save in flight."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    __del__ = close

    def busy(self) -> bool:
        """Says whether a save has not ended."""
        return self._request is not None and not self._result.done()

    def wait_for_snapshots(self) -> None:
        """Blocks until the caller may donate or overwrite the arrays of the save."""
        if self._request is not None:
            for _, snapshot in self._request.trees.values():
                while not snapshot.wait(0.5) and self.busy():
                    pass

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight; its own time bounds the wait unless a store hangs. Raises TimeoutError after `timeout_s`."""
        if self._request is None:
            return
        step, bound_s = self._request.step, self._context.options.save_timeout_s + 4 * RESULT_WAIT_S
        try:
            self._result.exception(bound_s if timeout_s is None else timeout_s)
        except TimeoutError:
            if timeout_s is not None:
                raise TimeoutError(f"the save of step {step} is still in flight after {timeout_s:g} s") from None
            root = self._context.storage.root
            raise SaveFailed(f"the save of step {step} hangs in the store {root} for over {bound_s:g} s", step=step) from None

    def take_error(self) -> HoldfastError | None:
        """Returns the error of the last save, once; None where it is in flight, or has raised its error already."""
        if self._request is None or not self._unread or self.busy():
            return None
        self._unread = False
        return None if self._request.broken is not None else self._result.result().error

    def raise_error(self) -> None:
        """Raises the error of the last save, once."""
        error = self.take_error()
        if error is not None:
            raise error


def _run(request: SaveRequest, context: SaveContext, result: Future[SaveResult]) -> None:
    threading.current_thread().name = f"holdfast-save-{request.step}"
    try:
        result.set_result(run_save(request, context))
    except BaseException as error:  # a defect; the next call raises it
        result.set_exception(error)


def _serve(saves: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs saves until None comes; holds none of them while it waits."""
    while (save := saves.get()) is not None:
        save()
        del save

"""The save in flight: at most one, on a thread of its own, and its result for the next call."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

from holdfast.coordination import HoldfastError

from ..errors import SaveFailed
from ..storage.base import Latch, start_thread
from .commit import RESULT_WAIT_S
from .protocol import SaveResult
from .save import SaveContext, run_save
from .stager import SaveRequest


class _Flight:
    """A save that was begun, and how it ended: its result, or a defect."""

    def __init__(self, request: SaveRequest) -> None:
        self.request = request
        self.ended = Latch()
        self.result: SaveResult | None = None
        self.defect: BaseException | None = None

    def run(self, context: SaveContext) -> None:
        threading.current_thread().name = f"holdfast-save-{self.request.step}"
        try:
            self.result = run_save(self.request, context)
        except BaseException as error:  # a defect; the next call raises it
            self.defect = error
        self.ended.set()


class AsyncSaver:
    """Runs the saves of a manager, one after the other. For one thread at a time."""

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._flight: _Flight | None = None  # the last
        self._unread = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def start(self, request: SaveRequest) -> None:
        """Begins a save; the one before has ended. One thread serves all: to start one would hold the caller until it runs.

        An interrupt (Ctrl-C) at any moment leaves either no save, or one that runs: what later calls wait for is noted last.
        """
        flight = _Flight(request)
        if self._queue is None:
            queued: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            start_thread(_serve, queued)
            self._queue = queued
        self._queue.put(functools.partial(flight.run, self._context))
        self._flight, self._unread = flight, True

    def close(self) -> None:
        """Lets the thread end, after the save in flight."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    __del__ = close

    def busy(self) -> bool:
        """Says whether a save has not ended."""
        return self._flight is not None and not self._flight.ended.is_set()

    def wait_for_snapshots(self) -> None:
        """Blocks until the caller may donate or overwrite the arrays of the save."""
        if self._flight is not None:
            for _, snapshot in self._flight.request.trees.values():
                while not snapshot.wait(0.5) and self.busy():
                    pass

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight; its own time bounds the wait unless a store hangs. Raises TimeoutError after `timeout_s`."""
        if self._flight is None:
            return
        step, bound_s = self._flight.request.step, self._context.options.save_timeout_s + 4 * RESULT_WAIT_S
        if self._flight.ended.wait(bound_s if timeout_s is None else timeout_s):
            return
        if timeout_s is not None:
            raise TimeoutError(f"the save of step {step} is still in flight after {timeout_s:g} s")
        root = self._context.storage.root
        raise SaveFailed(f"the save of step {step} hangs in the store {root} for over {bound_s:g} s", step=step)

    def take_error(self) -> HoldfastError | None:
        """Returns the error of the last save, once; None where it is in flight, or has raised its error already."""
        if self._flight is None or not self._unread or self.busy():
            return None
        self._unread = False
        if self._flight.defect is not None:
            raise self._flight.defect
        assert self._flight.result is not None
        return None if self._flight.request.broken is not None else self._flight.result.error

    def raise_error(self) -> None:
        """Raises the error of the last save, once."""
        error = self.take_error()
        if error is not None:
            raise error


def _serve(saves: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs saves until None comes; holds none of them while it waits."""
    while (save := saves.get()) is not None:
        save()
        del save

"""The save in flight: at most one, on a thread of its own, and the error that it leaves for the next call."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

from holdfast.coordination import HoldfastError

from ..errors import SaveFailed
from .commit import TELL_S, SaveContext, SaveRequest, run

Meter = Callable[[int], None]


class AsyncSaver:
    """Runs the saves of a manager, one after the other. For one thread at a time.

    `meter(save)` gives what counts its bytes, or None; `settled(save, gone)` hears on the save's thread how it ended, before anybody who
    waits for it does: its error, or the steps that it makes superfluous.
    """

    def __init__(
        self, desk: SaveContext, meter: Callable[[SaveRequest], Meter | None], settled: Callable[[SaveRequest, tuple[int, ...]], None]
    ) -> None:
        self._desk, self._meter, self._settled = desk, meter, settled
        self._save: SaveRequest | None = None
        self._lock = threading.Lock()  # guards _error, which the thread of a save sets
        self._error: HoldfastError | None = None
        self._saves: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def start(self, save: SaveRequest) -> None:
        """Begins a save; the one before has ended. One thread serves all: to start one would hold the caller until it runs."""
        self._save = save
        if self._saves is None:
            self._saves = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._saves,), name="holdfast-save", daemon=True).start()
        self._saves.put(functools.partial(self._run, save))

    def close(self) -> None:
        """Lets the thread end, after the save in flight."""
        if self._saves is not None:
            self._saves.put(None)
            self._saves = None

    __del__ = close

    def _run(self, save: SaveRequest) -> None:
        threading.current_thread().name = f"holdfast-save-{save.step}"
        try:
            gone = run(save, self._desk, self._meter(save))
            if save.error is not None:
                with self._lock:
                    self._error = None if save.broken else save.error  # who broke it has raised it
            self._settled(save, gone)
        finally:
            save.done.set()

    def busy(self) -> bool:
        """Says whether a save has not ended."""
        return self._save is not None and not self._save.done.is_set()

    def wait_for_snapshots(self) -> None:
        """Blocks until the caller may donate or overwrite the arrays of the save."""
        save = self._save
        if save is None:
            return
        for _, snapshot in list(save.trees.values()):
            while not snapshot.wait(0.5) and not save.done.is_set():
                pass

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight; its own time bounds the wait unless a store hangs. Raises TimeoutError after `timeout_s`."""
        save, bound = self._save, self._desk.save_timeout_s + 4 * TELL_S
        if save is None or save.done.wait(bound if timeout_s is None else timeout_s):
            return
        if timeout_s is not None:
            raise TimeoutError(f"the save of step {save.step} is still in flight after {timeout_s:g} s")
        root = self._desk.storage.root
        raise SaveFailed(f"the save of step {save.step} hangs in the store {root} for over {bound:g} s", step=save.step)

    def take_error(self) -> HoldfastError | None:
        """Returns the error of the last save, once."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raises it, once."""
        error = self.take_error()
        if error is not None:
            raise error


def _serve(saves: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs saves until None comes; holds none of them, nor their manager, while it waits."""
    while (save := saves.get()) is not None:
        save()
        del save

"""The save in flight, at most one of a manager, on a thread of its own.

The caller has a handle of it, and the next call its error. An interpreter that ends waits for the
saves in flight of all managers, also of those that are gone.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from holdfast.coordination import HoldfastError
from holdfast.multihost.group.group import settle_before_leaving

from ..agreement.save_protocol import SaveResult
from ..errors import CheckpointError, SaveCancelled, SaveFailed, clear_frames, error_text
from ..notebook import html_table, shown_bytes
from ..steps.opening import OpenRoot
from ..storage.threads import Latch, start_thread, stay_interrupted
from .commit import RESULT_WAIT_S
from .snapshot import ArrayWaits
from .stager import OneSave, SaveOrder

_log = logging.getLogger(__name__)
LOOK_S = 0.5  # how often a wait for snapshots looks whether their save has ended


class SaveRunner(Protocol):
    """What a saver asks of who does its saves."""

    @property
    def root(self) -> OpenRoot: ...

    def run(self, save: OneSave) -> SaveResult:
        """Does a whole save. Blocks; a failure is in the result."""


class _CalledBack(threading.local):
    """The saves whose callbacks a thread runs now."""

    def __init__(self) -> None:
        self.saves: list[OneSave] = []


_called_back = _CalledBack()


def refuse_in_callback(writer_id: str, call: str) -> None:
    """Raises RuntimeError where what was given to `on_commit` of a writer's save makes this call.

    The call would wait for the very save that waits for it.
    """
    for save in _called_back.saves:
        if save.key.save_id.startswith(writer_id):
            raise RuntimeError(
                f"{call}() was called by what was given to on_commit of step {save.step}, and"
                " that save ends when it returns; expected the call after that, on the thread that"
                " trains"
            )


class SaveHandle:
    """A save that was begun, or one that the save policy did not want, which is false. Thread-safe.

    Nobody needs to keep the handle. The save goes on without it, and a later call of the manager
    raises the save's error, unless `wait` has raised it.
    """

    def __init__(
        self, step: int, save: OneSave | None = None, context: SaveRunner | None = None
    ) -> None:
        self.step = step
        self._save = save
        self._context = context
        self._ended = Latch()
        self._told = Latch()  # that it has ended, to callbacks and the log
        self._result: SaveResult | None = None
        self._defect: BaseException | None = None
        self._is_unread = save is not None
        self._is_cancelled_here = False
        self._is_left = False  # its saver went: nobody asks it for the error
        self._callbacks: collections.deque[Callable[[int], object]] = collections.deque()
        if save is None:
            self._ended.set()

    def __bool__(self) -> bool:
        return self._save is not None

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.step}: {self._state()}>"

    def _repr_html_(self) -> str:
        rows = {"step": self.step, "state": self._state()}
        if self._save is not None:
            rows["size"] = shown_bytes(self._save.total_bytes)
        return html_table("SaveHandle", rows)

    def _state(self) -> str:
        if not self:
            return "skipped"
        if not self.done():
            return "in flight"
        error = self._error()
        return "committed" if error is None else f"failed: {error}"

    def done(self) -> bool:
        """Says whether the save has ended on this process, one way or the other."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the save has ended; raises its error, each time, where it failed.

        When it returns, the step is there, and what `on_commit` was given has been called. Raises
        TimeoutError after `timeout_s`; without it the save's own time is the bound. For a save that
        was skipped it returns at once.
        """
        if not self.done() and any(save is self._save for save in _called_back.saves):
            raise RuntimeError(
                f"what was given to on_commit waits for its own save, of step {self.step}, which"
                " ends when it returns"
            )
        self._join(timeout_s)
        self._is_unread = False
        if (error := self._error()) is not None:
            raise error

    def cancel(self) -> bool:
        """Calls the save off, on all processes; returns whether that came in time. Does not block.

        On the primary a call is in time until its commit begins. On another process it is in time
        until the process has reported its share. Then the step will not be there, and what was
        written is deleted. `wait` raises SaveCancelled, and so do later calls of the other
        processes' managers. Later calls of this manager do not.
        """
        if self._save is None or not self._save.cancellation.cancel():
            return False
        self._is_cancelled_here = True
        return True

    def on_commit(self, callback: Callable[[int], object]) -> None:
        """Calls `callback(step)` once the step is there, at once if it is there already.

        If the save fails it is never called. It is called on the saving thread before `wait`
        returns, so the next save waits for it. In it `save`, `delete`, `restore`, `reload`,
        `close` and waits of its manager raise RuntimeError. What it raises goes to the log.
        """
        self._callbacks.append(callback)
        if self.done() and self and self._error() is None:
            self._call_back()

    def _call_back(self) -> None:
        _called_back.saves.append(self._begun)
        try:
            # Another thread may call the rest: it has been told that the step is there, too.
            with contextlib.suppress(IndexError):
                while True:
                    self._call(self._callbacks.popleft())
        finally:
            _called_back.saves.pop()

    def _call(self, callback: Callable[[int], object]) -> None:
        try:
            callback(self.step)
        except Exception as error:
            _log.warning(
                "what was given to on_commit of step %d failed: %s",
                self.step,
                error_text(error),
            )

    def _error(self) -> BaseException | None:
        return self._defect or (None if self._result is None else self._result.error)

    def _run(self) -> None:
        """Does the save, on the saving thread. However little memory is left, it ends."""
        assert self._context is not None
        try:
            self._result = self._context.run(self._begun)
            if self._result.error is None:
                self._call_back()
        except BaseException as error:
            # A defect of the saver's own: the next call raises it.
            self._defect = error
        try:
            self._end()
        finally:
            _held.discard(self)
            self._told.set()

    def _end(self) -> None:
        try:
            if self._begun.broken is None:  # else it is the caller's, and so are its frames
                clear_frames(self._error())
        finally:
            self._ended.set()
        # A callback may have come between the last call and the end.
        if self._error() is None:
            self._call_back()
        else:
            # Nobody calls them any more, and who holds the handle would hold the saver by them.
            self._callbacks.clear()
        if self._is_left:
            self._tell_lost()

    @property
    def _begun(self) -> OneSave:
        assert self._save is not None
        return self._save

    @property
    def _root(self) -> OpenRoot:
        assert self._context is not None
        return self._context.root

    @property
    def _what(self) -> str:
        return f"the save of step {self.step} to {self._root.where}"

    def _leave_to_parent(self) -> None:
        """Ends it in a forked child, where nothing saves it."""
        self._defect = ValueError(
            f"{self._what} belongs to the process that this one was forked from; expected wait()"
            " there"
        )
        self._is_unread = False
        self._ended = Latch()
        self._ended.set()

    def _leave(self) -> None:
        """Notes that nobody asks for the error: the log has it then."""
        self._is_left = True
        if self.done():
            self._tell_lost()

    def _tell_lost(self) -> None:
        try:
            error: BaseException | None = self._take_error(missed=True)
        except BaseException as defect:
            error = defect
        if error is not None and not isinstance(error, SaveCancelled):
            tell_lost(f"{self._what} failed: {error_text(error)}")

    def _join(self, timeout_s: float | None = None) -> None:
        """Waits for the end. Raises TimeoutError after `timeout_s`, SaveFailed if a store hangs."""
        if self._context is None:
            return
        if self._ended.wait(self._bound_s if timeout_s is None else timeout_s):
            return
        if timeout_s is not None:
            raise TimeoutError(
                f"the save of step {self.step} is still in flight after {timeout_s:g} s"
            )
        raise self._hangs()

    @property
    def _bound_s(self) -> float:
        """The seconds after which a save that has not ended hangs in the store."""
        return self._root.options.save_timeout_s + 4 * RESULT_WAIT_S

    def _hangs(self) -> SaveFailed:
        return SaveFailed(
            f"the save of step {self.step} hangs in the store {self._root.where} for over"
            f" {self._bound_s:g} s",
            step=self.step,
        )

    def _wait_for_snapshots(self) -> None:
        """Blocks until the caller may donate or overwrite the arrays of the save.

        Raises SaveFailed if a store hangs.
        """
        began_s = time.perf_counter()
        end = time.monotonic() + self._bound_s
        for snapshot in self._begun.trees.values():
            while not snapshot.wait(min(LOOK_S, max(0.0, end - time.monotonic()))):
                if self.done():
                    break
                if time.monotonic() >= end:
                    raise self._hangs()
        self._begun.waits.add_late(began_s)

    def _let_go_of_arrays(self) -> None:
        """Calls the save off if it still needs the caller's arrays; blocks while it copies some."""
        snapshots = self._begun.trees.values()
        if all(snapshot.wait(0) for snapshot in snapshots):
            return
        self.cancel()
        for snapshot in snapshots:
            snapshot.stop_copies()

    def _take_error(self, *, missed: bool) -> HoldfastError | None:
        """Returns the error of a save that has ended, unless it was raised; that of a miss only
        with `missed`. Raises a defect.
        """
        if not self._is_unread or not self.done():
            return None
        if self._result is not None and self._result.missed and not missed:
            return None
        self._is_unread = False
        if self._defect is not None:
            raise self._defect
        assert self._result is not None
        error = self._result.error
        was_raised = self._begun.broken is not None or (
            self._is_cancelled_here and isinstance(error, SaveCancelled)
        )
        return None if was_raised else error


class AsyncSaver:
    """Runs the saves of a manager, one after the other. For one thread at a time."""

    def __init__(self, context: SaveRunner) -> None:
        self._context = context
        self._last: SaveHandle | None = None
        self._queue: queue.SimpleQueue[SaveHandle | None] | None = None

    def start(self, save: OneSave) -> SaveHandle:
        """Begins a save; the one before has ended."""
        handle = SaveHandle(save.step, save, self._context)
        self._enqueue(handle)
        return handle

    def _enqueue(self, handle: SaveHandle) -> None:
        queued = self._queue_of_thread()
        if queued is None:
            self._last = handle
            handle._run()
            stay_interrupted()
            return
        try:
            _held.add(handle)
            queued.put(handle)
        except BaseException:
            _held.discard(handle)
            raise
        # Last: an interrupt (Ctrl-C) before leaves no save that a later call would wait for.
        self._last = handle

    def _queue_of_thread(self) -> queue.SimpleQueue[SaveHandle | None] | None:
        """Returns what the saving thread takes saves from; None where the interpreter ends, and the
        caller has to do them.
        """
        if is_interpreter_ending():
            return None
        # One thread serves all saves: to start a thread holds the caller until the thread runs.
        if self._queue is None:
            queued: queue.SimpleQueue[SaveHandle | None] = queue.SimpleQueue()
            try:
                start_thread(_serve, queued)
            except RuntimeError:
                return None
            self._queue = queued
        return self._queue

    def begin(self, save: OneSave) -> SaveHandle:
        """Begins a save as `start` does; returns when the caller may change its arrays.

        An interrupt (Ctrl-C) calls the save off unless it has all that it needs of them. Raises
        SaveFailed if a store hangs.
        """
        handle = SaveHandle(save.step, save, self._context)
        try:
            self._enqueue(handle)
            handle._wait_for_snapshots()
        except SaveFailed:
            raise
        except BaseException:
            handle._let_go_of_arrays()
            raise
        return handle

    @contextlib.contextmanager
    def preparing(self, save: OneSave) -> Iterator[None]:
        """Surrounds the preparation of a save that all processes of a group begin.

        Where it fails, the other processes learn that this one cannot save.
        """
        try:
            yield
        except BaseException as error:
            if save.group.count > 1:
                save.fail(_broken_by(error, save.step))
                self.start(save)
            raise

    def close(self) -> None:
        """Lets the thread end, after the save in flight."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    def leave(self) -> None:
        """Closes it, and has the log say what goes wrong with the last save, unless it is read."""
        self.close()
        if self._last is not None:
            self._last._leave()

    __del__ = leave

    def busy(self) -> bool:
        """Says whether a save has not ended."""
        return self._last is not None and not self._last.done()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight; its own time bounds the wait unless `timeout_s` does."""
        if self._last is not None:
            self._last._join(timeout_s)

    def join_before(self, order: SaveOrder, waits: ArrayWaits) -> None:
        """Waits as `join` does, before the next save. While that one's arrays are not there, it
        would have waited for them.
        """
        last = self._last
        if last is not None and not last.done():
            waits.wait_meanwhile(order.arrays(), last._ended.wait)
        self.join()

    def take_error(self, *, missed: bool = False) -> HoldfastError | None:
        """Returns the error of the last save, once; None while it is in flight.

        One of a miss (Options.on_save_error) is returned with `missed` alone.
        """
        return None if self._last is None else self._last._take_error(missed=missed)


def _broken_by(error: BaseException, step: int) -> Exception:
    if isinstance(error, OSError) and not isinstance(error, HoldfastError):
        # It is raised here: no other process may let it pass as a miss.
        return SaveFailed(error_text(error), step=step)
    if isinstance(error, Exception):
        return error
    return SaveFailed(f"it was interrupted: {error!r}", step=step)


def _serve(saves: queue.SimpleQueue[SaveHandle | None]) -> None:
    """Runs saves until None comes; holds none of them while it waits."""
    while (save := saves.get()) is not None:
        with contextlib.suppress(MemoryError):
            try:
                threading.current_thread().name = f"holdfast-save-{save.step}"
            finally:
                save._run()
        del save


# --- all saves of this process

# A save that was begun is held here until it ends, whoever else has let go of it: with it are held
# its claim, and the lock that keeps others from sweeping what it writes.
_held: set[SaveHandle] = set()
# Nobody waits any more for a save that goes on when its call has returned.
_ending = threading.Event()


def is_interpreter_ending() -> bool:
    """Says whether nobody waits for saves any more that go on when their call has returned."""
    return _ending.is_set()


def settle(timeout_s: float | None = None) -> None:
    """Waits for the saves in flight, for each as long as its options say and for at most
    `timeout_s`. Tells of those that have not ended.
    """
    began_s = time.monotonic()
    for save in list(_held):
        bound_s = save._root.options.exit_timeout_s
        if timeout_s is not None:
            bound_s = min(bound_s, timeout_s)
        try:
            has_ended = save._told.wait(max(0.0, began_s + bound_s - time.monotonic()))
        except KeyboardInterrupt:
            for each in list(_held):
                tell_lost(f"{each._what} was in flight when the wait for it was interrupted")
            raise
        if not has_ended:
            tell_lost(
                f"{save._what} was in flight, and has not ended in {bound_s:g} s: it is not waited"
                " for any longer, and its step may be missing"
            )


def refuse_after_end(what: str) -> None:
    """Raises CheckpointError where the interpreter has ended all threads: it is too late to save,
    for instance in the finalizer of a global object.
    """
    if sys.is_finalizing():
        raise CheckpointError(
            f"{what} is not saved: the interpreter has ended, and all its threads; expected the"
            " save before, at the latest in a hook of atexit"
        )


def tell_lost(message: str) -> None:
    """Tells that a save was lost, where no caller is there to raise it to: in the log, and on
    stderr if the log does not go there.
    """
    _log.error("%s", message)
    if not _log_reaches_stderr() and sys.stderr is not None:
        print(f"holdfast: {message}", file=sys.stderr, flush=True)


def tell_besides(error: BaseException, message: str) -> None:
    """Tells that a save was lost while another error is raised, and notes it there: who catches
    that error, or ends the program by it, may not show its notes.
    """
    error.add_note(f"besides, {message}")
    tell_lost(message)


def _log_reaches_stderr() -> bool:
    if not _log.isEnabledFor(logging.ERROR):
        return False
    if not _log.hasHandlers():
        return True  # Python's handler of last resort
    logger: logging.Logger | None = _log
    while logger is not None:
        for handler in logger.handlers:
            if getattr(handler, "stream", None) is sys.stderr and handler.level <= logging.ERROR:
                return True
        logger = logger.parent if logger.propagate else None
    return False


def settle_at_exit() -> None:
    """Waits for the saves in flight; from here on a save is done before its call returns."""
    _ending.set()
    try:
        settle()
    except KeyboardInterrupt:
        _held.clear()


def _leave_to_parent() -> None:
    _ending.clear()
    for save in list(_held):
        save._leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
settle_before_leaving(settle)

"""Threads that Ctrl-C cannot break: one event, a thread's start, work side by side, and bytes that
they share.
"""

from __future__ import annotations

import _thread
import atexit
import collections
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..memory.levels import UNLIMITED_BYTES

# How often a wait looks for itself. A thread that has not begun by then may lack memory for its
# first call: it says nothing.
LOOK_S = 1.0
ASKED_BYTES = 1 << 20  # who takes so much asks what the host has left


class Latch:
    """Waits for one event, in a way that Ctrl-C cannot break. Thread-safe.

    What is built upon conditions (threading.Event, Future, Thread.start) runs Python code with a
    lock held or lent. A KeyboardInterrupt in there leaves the lock held for ever, so that the next
    thread hangs, or comes out as a RuntimeError. A bare lock is taken in one operation.
    """

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._is_set = False

    def set(self) -> None:
        """Lets all go on that wait, for good. Called once."""
        self._is_set = True
        self._lock.release()

    def is_set(self) -> bool:
        """Says whether the event has come."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the event comes; returns whether it has."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set and (remaining := end - time.monotonic()) > 0:
            # Each waiter passes the lock on. One that is interrupted before does not, so that
            # nobody waits for the lock longer than this.
            if self._lock.acquire(timeout=min(remaining, LOOK_S)):
                self._lock.release()
        return self._is_set


def start_thread(work: Callable[..., object], *arguments: object) -> None:
    """Starts a daemon thread, in one operation (see Latch), and waits until it has begun. Raises
    RuntimeError where the interpreter starts none any more, or the thread cannot begin.
    """
    begun = Latch()
    first: dict[None, str] = {}  # who comes first decides: `setdefault` is one operation

    def run() -> None:
        if first.setdefault(None, "thread") == "thread":
            begun.set()
            work(*arguments)

    _start(run)
    if not begun.wait(LOOK_S) and first.setdefault(None, "caller") == "caller":
        raise RuntimeError(f"a thread has not begun in {LOOK_S:g} s")


def _start(work: Callable[..., object], *arguments: object) -> None:
    if sys.is_finalizing():  # before Python 3.12 a thread would start, and never run
        raise RuntimeError("the interpreter has ended its threads")
    _thread.start_new_thread(work, arguments)


def do_beside(work: Callable[..., object], *arguments: object) -> None:
    """Does work that ends on a daemon thread, or here where none begins: at the interpreter's end,
    and in Python 3.12.0 and 3.12.1 as soon as its main thread has ended.
    """
    try:
        start_thread(work, *arguments)
    except RuntimeError:
        work(*arguments)


def run_side_by_side(
    work: Callable[[Any], Any], items: list[Any], max_concurrency: int
) -> list[Any]:
    """Does `work` on each item, on up to `max_concurrency` threads that end with the call.

    Returns the results in the order of the items. Raises the first error after all have ended.
    """
    if len(items) <= 1:
        return [work(item) for item in items]
    todo = collections.deque(enumerate(items))
    results: list[Any] = [None] * len(items)
    errors: list[BaseException | None] = [None] * len(items)
    begun: list[Latch] = []

    def serve(ended: Latch) -> None:
        begun.append(ended)
        try:
            while todo:
                with contextlib.suppress(IndexError):  # another thread took the last
                    index, item = todo.popleft()
                    try:
                        results[index] = work(item)
                    except BaseException as error:
                        errors[index] = error
                        del item  # the error holds this frame, which may not have ended
        finally:
            ended.set()

    threads: list[Latch] = []
    wanted = min(max_concurrency, len(items))
    try:
        with contextlib.suppress(RuntimeError):
            while len(threads) < wanted:
                ended = Latch()
                _start(serve, ended)
                threads.append(ended)
        if len(threads) < wanted or not all(_has_ended(ended, begun) for ended in threads):
            serve(Latch())
        _wait_for_all(begun)
    except BaseException:
        # Ctrl-C: what has begun ends first, and a thread that begins later finds nothing to do.
        todo.clear()
        _wait_for_all(begun)
        raise
    for error in errors:
        if error is not None:
            raise error
    return results


def _has_ended(ended: Latch, begun: list[Latch]) -> bool:
    """Waits for the end of a thread; returns whether it has begun at all."""
    while not ended.wait(LOOK_S):
        if ended not in begun:
            return False
    return True


def _wait_for_all(begun: list[Latch]) -> None:
    for ended in list(begun):
        ended.wait()


class ByteBudget:
    """At most `total_bytes`, of which `spare_bytes` are only for `try_take`, and half of what
    `free_bytes` says that the host has left. Thread-safe.

    Ctrl-C leaves neither a lock held nor bytes taken: who takes is noted in one operation, and a
    bare lock is held by a `with` alone (see Latch).
    """

    def __init__(
        self,
        total_bytes: int,
        spare_bytes: int = 0,
        free_bytes: Callable[[], int] = lambda: UNLIMITED_BYTES,
    ) -> None:
        self._total_bytes = total_bytes
        self._shared_bytes = total_bytes - spare_bytes
        self._free_bytes = free_bytes
        self._taken: dict[object, int] = {}  # by who has taken them
        self._waiting: list[Latch] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, nbytes: int, most_bytes: int = 0) -> Iterator[int]:
        """Takes bytes, once they are free, and of what is free then `most_bytes` at most; yields
        how many. More than there are at all wait for all of them.
        """
        taker = object()
        limit = self._limit_bytes(nbytes)
        try:
            while (latch := self._take(taker, nbytes, most_bytes, limit)) is not None:
                latch.wait(LOOK_S)
            yield self._taken[taker]
        finally:
            self.give(taker)

    def _limit_bytes(self, nbytes: int) -> int:
        if nbytes < ASKED_BYTES:
            return self._shared_bytes
        free = self._free_bytes() // 2
        with self._lock:
            return min(self._shared_bytes, max(ASKED_BYTES, sum(self._taken.values()) + free))

    def _take(self, taker: object, nbytes: int, most_bytes: int, limit: int) -> Latch | None:
        """Takes bytes, or returns what is set once others have given some."""
        wanted = min(nbytes, limit)
        with self._lock:
            left = limit - sum(self._taken.values())
            if wanted <= left:
                self._taken[taker] = max(wanted, min(most_bytes, left))
                return None
            latch = Latch()
            self._waiting.append(latch)
            return latch

    def take(self, taker: object, nbytes: int) -> Latch | None:
        """Takes bytes for `taker`, if they are free; else returns what is set once others have
        given some. More than there are at all are all of them.
        """
        return self._take(taker, nbytes, 0, self._shared_bytes)

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for bytes."""
        return bool(self._waiting)

    def try_take(self, taker: object, nbytes: int) -> bool:
        """Takes bytes, besides what `taker` has, if they are free; says whether they were."""
        with self._lock:
            if sum(self._taken.values()) + nbytes > self._total_bytes:
                return False
            self._taken[taker] = self._taken.get(taker, 0) + nbytes
            return True

    def give(self, taker: object) -> None:
        """Gives back what one has taken."""
        with self._lock:
            self._taken.pop(taker, None)
            waiting = self._waiting
            self._waiting = []
        for latch in waiting:
            latch.set()


def register_at_exit(finish: Callable[[], None]) -> None:
    """Has `finish` called, once or twice, when the interpreter ends: after the threads that it
    waits for, before hooks of `atexit` that were registered earlier.

    A child of `multiprocessing` may have no such hooks. There it is called when the main thread
    ends, and other threads may work on.
    """

    def end() -> None:
        finish()
        stay_interrupted()

    atexit.register(end)
    # Hooks of `threading` come before the other threads have ended.
    getattr(threading, "_register_atexit", atexit.register)(_finish_child, finish)


def stay_interrupted() -> None:
    """Has a program that Ctrl-C ends end by its signal, however much was done meanwhile: CPython
    goes by the last text that it ran, and each dataclass that is imported late runs one.
    """
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    if interrupted and not hasattr(sys, "ps1"):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _finish_child(finish: Callable[[], None]) -> None:
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        finish()

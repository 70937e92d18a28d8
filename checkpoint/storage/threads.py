"""Threads that Ctrl-C cannot break: one event, a thread's start, and work side by side."""

from __future__ import annotations

import _thread
import atexit
import collections
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 1.0  # how often a wait looks for itself


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
    """Starts a daemon thread, in one operation: see Latch. Raises RuntimeError where the
    interpreter starts none any more.
    """
    if sys.is_finalizing():  # before Python 3.12 a thread would start, and never run
        raise RuntimeError("the interpreter has ended its threads")
    _thread.start_new_thread(work, arguments)


def do_beside(work: Callable[..., object], *arguments: object) -> None:
    """Does work that ends on a daemon thread, or here where the interpreter starts none: at its
    end, and in Python 3.12.0 and 3.12.1 as soon as its main thread has ended.
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
    errors: dict[int, BaseException] = {}
    begun: list[Latch] = []

    def serve(ended: Latch) -> None:
        begun.append(ended)
        while todo:
            with contextlib.suppress(IndexError):  # another thread took the last
                index, item = todo.popleft()
                try:
                    results[index] = work(item)
                except BaseException as error:
                    errors[index] = error
        ended.set()

    threads = [Latch() for _ in range(min(max_concurrency, len(items)))]
    try:
        for ended in threads:
            do_beside(serve, ended)
        for ended in threads:
            ended.wait()
    except BaseException:
        # Ctrl-C: what has begun ends first, and a thread that begins later finds nothing to do.
        todo.clear()
        for ended in list(begun):
            ended.wait()
        raise
    if errors:
        raise errors[min(errors)]
    return results


def register_at_exit(finish: Callable[[], None]) -> None:
    """Has `finish` called, once or twice, when the interpreter ends: after the threads that it
    waits for, before hooks of `atexit` that were registered earlier.

    A child of `multiprocessing` may have no such hooks. There it is called when the main thread
    ends, and other threads may work on.
    """
    atexit.register(finish)
    # Hooks of `threading` come before the other threads have ended.
    getattr(threading, "_register_atexit", atexit.register)(_finish_child, finish)


def _finish_child(finish: Callable[[], None]) -> None:
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        finish()

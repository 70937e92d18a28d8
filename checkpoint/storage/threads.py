"""Threads that Ctrl-C cannot break: one event, a thread's start, and work side by side."""

from __future__ import annotations

import _thread
import atexit
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as _executors
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
    """Starts a daemon thread, in one operation: see Latch."""
    _thread.start_new_thread(work, arguments)


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
            start_thread(serve, ended)
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
    """Has `finish` called when the interpreter exits, while threads and executors still work."""
    # In hooks of `atexit` they are gone. Of these hooks the last registered runs first: that of the
    # executors, which was registered when their module was imported, runs after ours.
    assert _executors is not None
    getattr(threading, "_register_atexit", atexit.register)(finish)

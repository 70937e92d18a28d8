"""The seam between a checkpoint and the bytes of its store: seven verbs, for POSIX folders and
object stores alike.

Names are relative to the store's root, with `/` between their parts. A store knows nothing of
trees, packs or steps; all calls block and may come from several threads at once.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

LOOK_S = 1.0  # how often a wait looks for itself


class Latch:
    """Waits for one event, in a way that Ctrl-C cannot break. Thread-safe.

    What is built upon conditions (threading.Event, Future, Thread.start) runs Python code with a
    lock held or lent: a KeyboardInterrupt in there leaves it held for ever, so that the next thread
    hangs, or comes out as a RuntimeError. A bare lock is taken in one operation.
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
            if self._lock.acquire(
                timeout=min(remaining, LOOK_S)
            ):  # another who waits may be interrupted before it passes the lock on
                self._lock.release()
        return self._is_set


def start_thread(work: Callable[..., object], *arguments: object) -> None:
    """Starts a daemon thread, in one operation: see Latch."""
    _thread.start_new_thread(work, arguments)


def run_side_by_side(
    work: Callable[[Any], Any], items: list[Any], max_concurrency: int
) -> list[Any]:
    """Does `work` on each item, on up to `max_concurrency` threads that end with the call; raises
    the first error after all have ended.
    """
    if len(items) <= 1:
        return [work(item) for item in items]
    todo, results, errors = (
        collections.deque(enumerate(items)),
        [None] * len(items),
        dict[int, BaseException](),
    )
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
    except BaseException:  # Ctrl-C: what has begun ends first; who begins later finds nothing to do
        todo.clear()
        for ended in list(begun):
            ended.wait()
        raise
    if errors:
        raise errors[min(errors)]
    return results


Part: TypeAlias = tuple[int, Sequence[memoryview]]


def count_parts(parts: Iterable[Part], on_bytes: Callable[[int], None]) -> Iterator[Part]:
    """Yields parts, and reports how many bytes each had once it has been written."""
    for offset, buffers in parts:
        yield offset, buffers
        on_bytes(sum(buffer.nbytes for buffer in buffers))


@dataclass(frozen=True)
class Entry:
    """One name in a listing. A folder's name ends in `/` and its size is 0. A file's size is None
    where a listing has none.

    `modified_s` is by the store's clock, 0.0 where unknown. `links` is how many names the file has,
    1 where a store knows of one only.
    """

    name: str
    size: int | None
    modified_s: float = 0.0
    links: int = 1


class NotCommitted(OSError):
    """Says that a commit was refused for certain: its name does not exist, and never will by this
    call.
    """


class NameTaken(NotCommitted):
    """Says that a commit was refused for certain, because another file has the name."""


class Storage(Protocol):
    """The whole of what the checkpoint room asks of a store.

    Errors are the operating system's: FileNotFoundError for a missing name, OSError for the rest;
    `commit` alone raises `NotCommitted` and `Fenced` too. `root` is how messages show the store. A
    file longer than `max_file_bytes` cannot be written (None: no bound), and `max_concurrency` is
    how many reads or writes are worth running side by side.
    """

    @property
    def root(self) -> str: ...

    @property
    def max_file_bytes(self) -> int | None: ...

    @property
    def max_concurrency(self) -> int: ...

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        """Writes a file of exactly `size` bytes, durably, name and folders included.

        `parts` are (offset, buffers): they cover the file once, in any order (the head of a pack
        comes last, at 0), and are made while the file is written, so that a store may begin before
        the last is known. Missing folders are made. A file of that name is replaced. An error, from
        `parts` too, leaves at most a file that no record names.
        """

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills the buffers in turn with the bytes from `offset` on; returns how many there were,
        fewer only at the end of the file.
        """

    def size(self, name: str) -> int:
        """Returns the size of a file. Cheap on a disk; an object store may read a few dozen single
        bytes for it.
        """

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        """Returns a whole small file; raises OverflowError, having read nothing, when it is longer
        than `limit_bytes`.
        """

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        """Makes `name` exist with `data`, whole and durable, if no such file is there (NameTaken)
        and the claim stands (Fenced).

        Raises NotCommitted where it was refused for certain; after any other OSError the name may
        exist, now or later, durable or not. FileExistsError is one of these: a file is there, and
        whether a try of this call put it there, for a while, is not known.

        With `replace` a file that is there is replaced in one step. `claim` is the folder of the
        writer's claim; on POSIX the data is written and fsynced inside it and linked from there, so
        that a claim that was renamed away stops the commit.
        """

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        """Lists a folder ("" is the root; a missing one is empty): its files and folders, or with
        `recursive` all files below it.

        Entry names are relative to the root and sorted. With `names_only` files have no size and no
        time: on a disk no file is looked at.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Deletes files, and folders (names that end in `/`) if they are empty, in the order given;
        durable on return; missing is done.
        """

"""A folder as a store whose calls fail as they are told: the scheme `faulty://`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.checkpoint import Storage, register_storage
from holdfast.checkpoint.storage.base import Entry, Part
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.path import open_storage

SCHEME = "faulty"
VERBS = ("write", "read", "fetch", "commit", "list", "delete", "link")
ERRORS = ("EIO", "ENOSPC", "EMFILE", "ENOENT", "ESTALE", "memory")
FOR_EVER = 1000  # calls


class Faults:
    """The fault that calls run into: so many calls of a verb in a row, from a place on.

    With `after` a call is made all the same, as where only its answer was lost. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.disarm()

    def arm(self, verb: str, error: str, *, place: int, times: int, after: bool) -> None:
        """Begins to count calls of a verb."""
        with self._lock:
            self._verb = verb
            self._error = error
            self._places = range(place, place + times)
            self._after = after
            self._calls = 0
            self.hits = 0

    def disarm(self) -> None:
        """Lets all calls go well."""
        with self._lock:
            self._verb = ""
            self.hits = 0

    def next(self, verb: str) -> tuple[bool, bool]:
        """Counts a call; returns whether it fails, and whether it is made before that."""
        with self._lock:
            if verb != self._verb:
                return False, False
            fails = self._calls in self._places
            self._calls += 1
            self.hits += fails
            return fails, self._after

    def error(self, name: str) -> Exception:
        """Returns what a call raises."""
        if self._error == "memory":
            return MemoryError(name)
        number = getattr(errno, self._error)
        return OSError(number, os.strerror(number), name)


FAULTS = Faults()


class FaultyFolder:
    """What the folder of a store can do besides; its links may fail."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def link(self, source: str, name: str, size: int) -> None:
        fails, after = FAULTS.next("link")
        if fails and not after:
            raise FAULTS.error(name)
        self._folder.link(source, name, size)
        if fails:
            raise FAULTS.error(name)


class FaultyStorage(CountingStorage):
    """Passes everything on to a folder, where no fault is due."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, lambda nbytes: None)
        self._folder = FaultyFolder(storage.posix)

    @property
    def posix(self) -> Any:
        return self._folder

    def _call(self, verb: str, name: str, *arguments: Any, **words: Any) -> Any:
        fails, after = FAULTS.next(verb)
        call = getattr(super(), verb)
        if fails and not after:
            raise FAULTS.error(name)
        value = call(name, *arguments, **words)
        if fails:
            raise FAULTS.error(name)
        return value

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        self._call("write", name, size, parts)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        return int(self._call("read", name, offset, buffers))

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        return bytes(self._call("fetch", name, limit_bytes))

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        self._call("commit", name, data, claim, replace=replace)

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        return list(self._call("list", folder, recursive=recursive, names_only=names_only))

    def delete(self, names: Sequence[str]) -> None:
        fails, after = FAULTS.next("delete")
        if fails and not after:
            raise FAULTS.error(next(iter(names), ""))
        super().delete(names)
        if fails:
            raise FAULTS.error(next(iter(names), ""))


def register() -> None:
    """Has URLs that begin with faulty:// mean folders with faults."""
    register_storage(
        SCHEME,
        lambda url, single_writer: FaultyStorage(
            open_storage(url.removeprefix(f"{SCHEME}://"), single_writer=single_writer)
        ),
    )

"""Stores whose calls a test hears of before they are made: it may let them wait, or fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from holdfast.checkpoint import Storage, register_storage
from holdfast.checkpoint.storage.base import Entry, Part
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.path import open_storage
from holdfast.checkpoint.storage.retries import until

# Gets the verb, the name, and when the call's time ends, by the monotonic clock.
Before: TypeAlias = Callable[[str, str, float], None]
SCHEME = "told"


class ToldStorage(CountingStorage):
    """Passes everything on to another store, once `before` has returned."""

    def __init__(self, storage: Storage, before: Before, end_s: float = math.inf) -> None:
        super().__init__(storage, lambda nbytes: None)
        self._before = before
        self._end_s = end_s

    def until(self, end_s: float) -> ToldStorage:
        return ToldStorage(until(self._storage, end_s), self._before, end_s)

    def _tell(self, verb: str, name: str) -> None:
        self._before(verb, name, self._end_s)

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        self._tell("write", name)
        super().write(name, size, parts)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        self._tell("read", name)
        return super().read(name, offset, buffers)

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        self._tell("fetch", name)
        return super().fetch(name, limit_bytes)

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        self._tell("commit", name)
        super().commit(name, data, claim, replace=replace)

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        self._tell("list", folder)
        return super().list(folder, recursive=recursive, names_only=names_only)

    def delete(self, names: Sequence[str]) -> None:
        self._tell("delete", next(iter(names), ""))
        super().delete(names)


def told_url(root: object, before: Before) -> str:
    """Returns a URL of the store of `root`, a folder or a URL, whose calls `before` hears of."""
    register_storage(
        SCHEME,
        lambda url, single_writer: ToldStorage(
            open_storage(url.removeprefix(f"{SCHEME}://"), single_writer=single_writer), before
        ),
    )
    return f"{SCHEME}://{root}"

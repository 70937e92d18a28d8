"""A store that counts the bytes that go through it: for progress bars, and for tests of reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from .base import Buffers, KeepsFilesOpen, Part, Storage


def count_parts(parts: Iterable[Part], on_bytes: Callable[[int], None]) -> Iterator[Part]:
    """Yields parts, and reports how many bytes each had once it has been written."""
    for offset, buffers in parts:
        yield offset, buffers
        on_bytes(sum(buffer.nbytes for buffer in buffers))


class CountingStorage:
    """Passes everything on to another store, and the number of bytes to `on_bytes`.

    `on_bytes` is called from several threads. It is public, since a driver that reads past this
    store reports its own bytes there.
    """

    def __init__(self, storage: Storage, on_bytes: Callable[[int], None]) -> None:
        self._storage = storage
        self.on_bytes = on_bytes
        # What no bytes go through is the other store's.
        self.root = storage.root
        self.max_file_bytes = storage.max_file_bytes
        self.max_concurrency = storage.max_concurrency
        self.posix = storage.posix
        self.conditions = storage.conditions
        self.tensorstore = storage.tensorstore
        self.size = storage.size
        self.commit = storage.commit
        self.list = storage.list
        self.delete = storage.delete

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        self._storage.write(name, size, count_parts(parts, self.on_bytes))

    def read(self, name: str, offset: int, buffers: Buffers) -> int:
        done = self._storage.read(name, offset, buffers)
        self.on_bytes(done)
        return done

    def kept_open(self, name: str) -> AbstractContextManager[None]:
        if isinstance(self._storage, KeepsFilesOpen):
            return self._storage.kept_open(name)
        return nullcontext()

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        data = self._storage.fetch(name, limit_bytes)
        self.on_bytes(len(data))
        return data

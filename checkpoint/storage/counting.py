"""A store that counts the bytes that go through it: for progress bars, and for tests of reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from .base import (
    Buffers,
    ConditionalWrites,
    Entry,
    KeepsFilesOpen,
    Part,
    PosixFolder,
    Storage,
    TensorStoreAccess,
)


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

    @property
    def root(self) -> str:
        return self._storage.root

    @property
    def max_file_bytes(self) -> int | None:
        return self._storage.max_file_bytes

    @property
    def max_concurrency(self) -> int:
        return self._storage.max_concurrency

    @property
    def posix(self) -> PosixFolder | None:
        return self._storage.posix

    @property
    def conditions(self) -> ConditionalWrites | None:
        return self._storage.conditions

    @property
    def tensorstore(self) -> TensorStoreAccess | None:
        return self._storage.tensorstore

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

    def size(self, name: str) -> int:
        return self._storage.size(name)

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        data = self._storage.fetch(name, limit_bytes)
        self.on_bytes(len(data))
        return data

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        self._storage.commit(name, data, claim, replace=replace)

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        return self._storage.list(folder, recursive=recursive, names_only=names_only)

    def delete(self, names: Sequence[str]) -> None:
        self._storage.delete(names)

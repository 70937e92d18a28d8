"""A store that reports how many bytes go through it: for progress bars and for tests that count
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .base import Entry, Part, Storage, count_parts


class CountingStorage:
    """Passes everything on to another store, and the number of bytes read or written to `on_bytes`,
    from several threads.
    """

    def __init__(self, storage: Storage, on_bytes: Callable[[int], None]) -> None:
        self._storage = storage
        self._on_bytes = on_bytes

    @property
    def inner(self) -> Storage:
        """The store behind this one."""
        return self._storage

    @property
    def on_bytes(self) -> Callable[[int], None]:
        """Takes the number of bytes that went past this store, which a driver read by itself."""
        return self._on_bytes

    @property
    def root(self) -> str:
        return self._storage.root

    @property
    def max_file_bytes(self) -> int | None:
        return self._storage.max_file_bytes

    @property
    def max_concurrency(self) -> int:
        return self._storage.max_concurrency

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        self._storage.write(name, size, count_parts(parts, self._on_bytes))

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        done = self._storage.read(name, offset, buffers)
        self._on_bytes(done)
        return done

    def size(self, name: str) -> int:
        return self._storage.size(name)

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        data = self._storage.fetch(name, limit_bytes)
        self._on_bytes(len(data))
        return data

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        self._storage.commit(name, data, claim, replace=replace)

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        return self._storage.list(folder, recursive=recursive, names_only=names_only)

    def delete(self, names: Sequence[str]) -> None:
        self._storage.delete(names)

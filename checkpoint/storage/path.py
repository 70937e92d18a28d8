"""Which store a path or URL means, and folders in a store."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeAlias

from ..errors import Corrupt
from ..options import absolute as absolute
from .base import Buffers, Entry, Storage
from .bucket import BucketStorage
from .kvstore import KvStoreStorage
from .local import LocalStorage, StrPath

StorageOpener: TypeAlias = Callable[[str, bool], Storage]

_registered: dict[str, StorageOpener] = {}


def register_storage(scheme: str, opener: StorageOpener) -> None:
    """Makes URLs that begin with `scheme` and `://` mean stores of another kind. Provisional.

    `opener(url, single_writer)` returns the store of a root, and reads and writes nothing yet.
    `single_writer` is the caller's promise that nobody else writes there.
    """
    _registered[scheme] = opener


def join(*parts: str) -> str:
    """Returns a store's name of its parts; empty ones are left out."""
    return "/".join(part for part in parts if part)


SMALL_FILE_BYTES = 256 << 20  # other people's metadata: one JSON file for a whole tree


@dataclass(frozen=True)
class StorePath:
    """A folder in a store: `name` is relative to the store's root, "" for the root itself."""

    storage: Storage
    name: str = ""

    @classmethod
    def of(cls, path: StrPath) -> StorePath:
        """Returns the folder that a path or URL means, in the store of its parent folder."""
        parent, name = split(path)
        return cls(open_storage(parent), name)

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.storage, join(self.name, name))

    def __str__(self) -> str:
        return join(self.storage.root, self.name)

    @property
    def basename(self) -> str:
        """The last part of the name."""
        return str(self).rstrip("/").rpartition("/")[2]

    def names(self) -> dict[str, Entry]:
        """Returns what is in the folder, by its name there; folders end in `/`.

        A missing folder is empty.
        """
        skip = len(self.name) + 1 if self.name else 0
        return {entry.name[skip:]: entry for entry in self.storage.list(self.name)}

    def folders_of(self, names: Iterable[str]) -> list[str]:
        """Returns this folder and those below it that have these files, of the store, the inmost
        first: as `Storage.delete` takes them.
        """
        parents = {parent for name in names for parent in map(str, PurePosixPath(name).parents)}
        below = [each for each in parents if each != "." and each.startswith(self.name)]
        return [f"{each}/" for each in sorted(below, key=len, reverse=True)]

    def fetch(self, name: str, limit_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Returns a small file; raises Corrupt where it is missing or too large to be one."""
        path = f"{self}/{name}"
        try:
            return self.storage.fetch(join(self.name, name), limit_bytes)
        except FileNotFoundError:
            raise Corrupt(f"{path} is missing", path=path, file=path) from None
        except OverflowError as error:
            raise Corrupt(f"{path} is no metadata file: {error}", path=path, file=path) from None

    def read(self, name: str, offset: int, buffers: Buffers) -> int:
        """Fills `buffers` with bytes of a file, from `offset` on; returns how many there were."""
        return self.storage.read(join(self.name, name), offset, buffers)


def free_bytes(storage: Storage) -> int | None:
    """Returns how much room the disk of a folder has, which need not be there yet; None for what is
    no folder, and where the disk does not say.
    """
    if storage.posix is None:
        return None
    path = storage.posix.path
    with contextlib.suppress(OSError):  # who writes there will hear of it
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free
    return None


def split(path: StrPath) -> tuple[str, str]:
    """Returns the parent folder of a path or URL, and the last part.

    What follows a `?` in a URL stays with the folder.
    """
    path = absolute(path)
    if "://" not in path:
        parent, _, name = path.rpartition("/")
        return parent or "/", name
    url, mark, query = path.partition("?")
    parent, _, name = url.rstrip("/").rpartition("/")
    return f"{parent}{mark}{query}", name


def beside(path: StrPath, name: str) -> str:
    """Returns the path or URL of what is called so in the parent folder of another."""
    parent, _ = split(path)
    if "://" not in parent:
        return os.path.join(parent, name)
    url, mark, query = parent.partition("?")
    return f"{url}/{name}{mark}{query}"


def open_storage(
    path: StrPath,
    *,
    single_writer: bool = False,
    file_mode: int | None = None,
    folder_mode: int | None = None,
) -> Storage:
    """Returns the store of a root, which is a folder or a URL. Reads and writes nothing yet.

    The URL begins with gs://, gcs_grpc://, s3://, az://, memory://, or what `register_storage` was
    given. Raises ValueError for modes of files where the store has none.
    """
    text = absolute(path)
    if "://" not in text:
        return LocalStorage(
            text, single_writer=single_writer, file_mode=file_mode, folder_mode=folder_mode
        )
    if file_mode is not None or folder_mode is not None:
        raise ValueError(
            f"file_mode and folder_mode: {text} has no modes; expected a folder, or permissions of"
            " the bucket instead"
        )
    scheme = text.partition("://")[0]
    if scheme in _registered:
        return _registered[scheme](text, single_writer)
    if scheme in ("s3", "az", "memory"):
        return BucketStorage(text, single_writer=single_writer)
    if scheme in ("gs", "gcs_grpc"):
        return KvStoreStorage(text, single_writer=single_writer)
    raise ValueError(f"{text}: expected a folder, gs://, gcs_grpc://, s3://, az:// or memory://")

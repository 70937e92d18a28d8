"""The seam between a checkpoint and the bytes of its store, for POSIX folders and object stores.

Names are relative to the store's root, with `/` between their parts. A store knows nothing of
trees, packs or steps. All calls block, and may come from several threads at once.

This module is public: who writes a store implements `Storage` and runs
`holdfast.testing.StorageContract` on it. It is provisional: verbs may still be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

Buffers: TypeAlias = Sequence[memoryview]
Part: TypeAlias = tuple[int, Buffers]
# A value (None: there is none), and its generation.
Versioned: TypeAlias = tuple[bytes | None, bytes]


@dataclass(frozen=True)
class Entry:
    """One name in a listing. A folder's name ends in `/`, and its size is 0.

    A file's size is None where a listing has no sizes. `modified_s` is by the store's clock, 0.0
    where unknown. `links` is how many names the file has, 1 where a store knows of one only.
    """

    name: str
    size: int | None
    modified_s: float = 0.0
    links: int = 1


class NotCommitted(OSError):
    """A commit was refused for certain: this call has not made the name, and never will."""


class NameTaken(NotCommitted):
    """A commit was refused for certain, because another file has the name."""


class PosixFolder(Protocol):
    """What a store can do besides, if it is a folder of a POSIX file system.

    Claims are then files with locks, and a commit is a link. `folder_mode` is the mode of new
    folders (None: by the umask). `can_link` says whether the file system has hard links.
    """

    @property
    def path(self) -> Path: ...

    @property
    def folder_mode(self) -> int | None: ...

    @property
    def can_link(self) -> bool: ...

    def link(self, source: str, name: str, size: int) -> None:
        """Gives a file a second name, which is durable after `make_durable` of its folder.

        Raises OSError unless the file has `size` bytes.
        """

    def make_durable(self, folder: str) -> None:
        """Makes the names in a folder durable, those that other processes have made too."""


class ConditionalWrites(Protocol):
    """What a store can do besides, if it writes on conditions, as object stores do.

    Claims are then objects, and a commit is a conditional write. A generation stands for one
    version of a value, or for its absence. With `single_writer` nobody else writes, and there are
    no conditions.
    """

    @property
    def bucket(self) -> str:
        """What tells this server and bucket from others, whose conditions may be worth less."""

    @property
    def single_writer(self) -> bool: ...

    def keys(self, prefix: str) -> Sequence[str]:
        """Returns all names that begin so, sorted."""

    def get(self, name: str) -> Versioned:
        """Returns a value (None: there is none) and its generation."""

    def put(
        self, name: str, data: bytes | bytearray, generation: bytes | None = None
    ) -> bool | None:
        """Writes a value if its generation is still the one given (None: always).

        Returns whether the value was written; None where an earlier try of this call may have been,
        whose answer was lost, and another's write have come after it.
        """

    def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
        """Begins to write all values, each on the same condition; returns how many were written."""


class TensorStoreAccess(Protocol):
    """What a store can do besides, if tensorstore opens it: other libraries' arrays are read so."""

    @property
    def context(self) -> Any:
        """The tensorstore Context with the connections of this process; None: any."""

    def kvstore(self, folder: str) -> dict[str, Any]:
        """Returns tensorstore's JSON spec of a folder, to be opened in `context`."""


@runtime_checkable
class CountsRequests(Protocol):
    """What a store can do besides, if it counts its requests."""

    def statistics(self) -> dict[str, int]:
        """Returns counters by name, each of which begins with `store_`."""


@runtime_checkable
class TellsSizes(Protocol):
    """What a store can do besides, if each read tells the size of its file."""

    def read_sized(self, name: str, offset: int, buffers: Buffers) -> tuple[int, int | None]:
        """Does what `Storage.read` does; returns the file's size too, None where it is not told."""


@runtime_checkable
class KeepsFilesOpen(Protocol):
    """What a store can do besides, if each read opens its file."""

    def kept_open(self, name: str) -> AbstractContextManager[None]:
        """Has this thread's reads of a file open it once, until the context ends."""


@runtime_checkable
class HasCopies(Protocol):
    """What a store can do besides, if it reads a file from one of several copies."""

    def distrust(self, name: str) -> bool:
        """Reads a file no more from the copy that this thread has read it from last: its bytes are
        not what was written. Says whether another copy is left.
        """


@runtime_checkable
class SyncsFoldersOnce(Protocol):
    """What a store can do besides, if a new name is durable only when its folder is synced."""

    def synced_once(self, folder: str) -> AbstractContextManager[None]:
        """Has the files that are written straight into a folder be durable once the context has
        ended without an error: their names are made durable together. Files come from any thread.
        """


@runtime_checkable
class CopiesFiles(Protocol):
    """What a store can do besides, if it copies a file by itself, with no bytes over the network.

    `can_copy` says whether a copy is there, whole and durable, once `copy` has returned.
    """

    @property
    def can_copy(self) -> bool: ...

    def copy(self, source: str, name: str) -> None:
        """Copies a file within the store."""


@runtime_checkable
class EndsRequests(Protocol):
    """What a store can do besides, if its requests may take long and can be broken off."""

    def until(self, end_s: float) -> Storage:
        """Returns the same store whose requests fail at a time of the monotonic clock."""


class Readable(Protocol):
    """What is asked of a store to read a step. Provisional, see the module.

    Errors are the operating system's: FileNotFoundError for a missing name, OSError for the rest.
    `root` is how messages show the store. `max_concurrency` is how many reads or writes are worth
    running side by side. `posix` is as Storage has it.
    """

    @property
    def root(self) -> str: ...

    @property
    def max_concurrency(self) -> int: ...

    @property
    def posix(self) -> PosixFolder | None: ...

    def read(self, name: str, offset: int, buffers: Buffers) -> int:
        """Fills the buffers in turn with the bytes from `offset` on; returns how many there were.

        There are fewer only at the end of the file.
        """

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        """Returns a whole small file; raises OverflowError if it is longer than `limit_bytes`."""

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        """Lists the files and folders of a folder, or with `recursive` all files below it.

        "" is the root; a missing folder is empty. Names are relative to the root and sorted. With
        `names_only` files have no size and no time: on a disk no file is looked at.
        """


class Storage(Readable, Protocol):
    """The whole of what a checkpoint asks of a store. Provisional, see the module.

    `commit` alone raises `NotCommitted` and `Fenced`. A file longer than `max_file_bytes` cannot be
    written (None: no bound).

    A store says what else it can do by `posix`, `conditions` and `tensorstore`; None means that it
    cannot. A store that is written to has `posix` or `conditions`, because claims need one of them.
    """

    @property
    def max_file_bytes(self) -> int | None: ...

    @property
    def conditions(self) -> ConditionalWrites | None: ...

    @property
    def tensorstore(self) -> TensorStoreAccess | None: ...

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        """Writes a file of exactly `size` bytes, durably, with its name and folders.

        `parts` are (offset, buffers). They cover the file once. Where the first is for offset 0
        they come in order, and a store may stream them; else in any order (the head of a pack comes
        last). They are made while the file is written, so a store may begin early.
        Missing folders are made, and a file of that name is replaced. An error, from `parts` too,
        leaves at most a file that no record names.
        """

    def size(self, name: str) -> int:
        """Returns the size of a file."""

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        """Makes `name` exist with `data`, whole and durable, if it is free and the claim stands.

        Raises NameTaken or Fenced otherwise, and NotCommitted where it was refused for certain for
        another reason. After any other OSError the name may exist, now or later, durable or not.
        FileExistsError is one of these: a file is there, and whether a try of this call put it
        there, for a while, is not known.

        With `replace` a file that is there is replaced in one step. `claim` is the folder of the
        writer's claim. On POSIX the data is written and fsynced inside it and linked from there, so
        that a claim that was renamed away stops the commit.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Deletes files, and empty folders (names that end in `/`), in the order given.

        The deletions are durable on return. A missing name and a folder that is not empty are
        passed over.
        """

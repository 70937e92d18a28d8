"""What object stores have in common: commits by conditional writes, listings without tombstones.

A commit is a conditional write: it goes through only if the record is as this writer last saw it,
absent or a tombstone. There are no locks and no renames; a claim is an object, renewed by its
writer, and to fence a writer is to delete its claim. A commit that had already checked its claim is
stopped by a tombstone: a sweep writes one, by the same conditional write, as the record of each
step that it deletes packs of. A tombstone is no record: it is hidden from listings and reads, and
the next writer of that step replaces it. It names the writers that may not. Where a record stands
(an overwrite did not come to its end) the sweep writes the record anew with those names in it, so
that it is no longer what the fenced writer saw.

Nobody deletes a tombstone: only the step's next writer replaces it. That writer's step may be
deleted again, and then nothing is left of the tombstone. Whoever had checked its claim before all
that, and comes after it, finds after its commit that claim and packs are gone, and takes it back.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from holdfast.coordination import Fenced

from .base import (
    Buffers,
    ConditionalWrites,
    Entry,
    NameTaken,
    NotCommitted,
    Part,
    TensorStoreAccess,
    Versioned,
)
from .local import fenced
from .threads import run_side_by_side
from .tombstone import (
    RECORD_NAME,
    TOMBSTONE,
    TOMBSTONE_LIMIT_BYTES,
    fenced_writers,
    says_the_same,
    tombstone,
)

OBJECT_BYTES = 256 << 20  # of one pack: from a device its bytes are then on the host whole

COMMIT_TRIES = 8  # each loss of the race means that another writer won one


def split_url(url: str) -> tuple[str, str, str, str]:
    """Returns the scheme of a store's URL, its bucket, what every key begins with, and the settings
    after the `?`. A `#` or a `%` is one of a name.
    """
    address, _, query = url.partition("?")
    scheme, _, rest = address.partition("://")
    bucket, _, path = rest.partition("/")
    path = path.strip("/")
    if scheme == "memory":
        path = f"{bucket}/{path}".strip("/")
    return scheme, bucket, f"{path}/" if path else "", query


class ObjectStorage:
    """A store of objects below one prefix. Thread-safe.

    A subclass brings the requests: `_range`, `_entries`, `size`, `delete`, and those of
    ConditionalWrites but `keys`.
    """

    max_file_bytes: int | None = OBJECT_BYTES
    max_concurrency: int = 16
    posix = None

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        self.root = url.split("?", 1)[0].rstrip("/")
        self.single_writer = single_writer
        scheme, bucket, self._prefix, query = split_url(url)
        self.bucket = f"{scheme}://{bucket}?{query}"

    @property
    def conditions(self) -> ConditionalWrites:
        return self

    @property
    def tensorstore(self) -> TensorStoreAccess | None:
        return None

    # --- The requests of a subclass

    def _range(self, name: str, start: int, stop: int) -> Any:
        """Returns the bytes from `start` to `stop` or to the end of the object, as a buffer."""
        raise NotImplementedError

    def _entries(self, folder: str, *, recursive: bool) -> list[Entry]:
        """Returns what is in a folder ("" or a name that ends in `/`), tombstones too, sorted."""
        raise NotImplementedError

    def get(self, name: str) -> Versioned:
        raise NotImplementedError

    def put(
        self, name: str, data: bytes | bytearray, generation: bytes | None = None
    ) -> bool | None:
        raise NotImplementedError

    def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
        answers = run_side_by_side(
            lambda value: self.put(name, value, generation), list(values), len(values)
        )
        return answers.count(True)

    # --- What all of them do alike

    def keys(self, prefix: str) -> Sequence[str]:
        entries = self._entries(prefix[: prefix.rfind("/") + 1], recursive=True)
        return [entry.name for entry in entries if entry.name.startswith(prefix)]

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        self.put(name, joined(name, size, parts))

    def read(self, name: str, offset: int, buffers: Buffers) -> int:
        wanted = sum(buffer.nbytes for buffer in buffers)
        return fill(buffers, self._range(name, offset, offset + wanted))

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        data = bytes(self._range(name, 0, limit_bytes + 1))
        if len(data) > limit_bytes:
            raise OverflowError(f"{self.root}/{name} has more than {limit_bytes} bytes")
        if data.startswith(TOMBSTONE):
            raise self._missing(name)
        return data

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        folder = folder.strip("/")
        entries = self._entries(f"{folder}/" if folder else "", recursive=recursive)
        suspects = [entry.name for entry in entries if _may_be_tombstone(entry)]
        answers = run_side_by_side(self._is_tombstone, suspects, self.max_concurrency)
        hidden = set(itertools.compress(suspects, answers))
        shown = [entry for entry in entries if entry.name not in hidden]
        if not names_only:
            return shown
        return [Entry(entry.name, 0 if entry.name.endswith("/") else None) for entry in shown]

    def _is_tombstone(self, name: str) -> bool:
        try:
            return bytes(self._range(name, 0, len(TOMBSTONE))) == TOMBSTONE
        except FileNotFoundError:
            return True

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "No such object", f"{self.root}/{name}")

    # --- Commits

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        is_unclear = False  # whether a try may have been applied, and replaced since
        for _ in range(COMMIT_TRIES):
            try:
                standing, generation = self._before_commit(name, data, claim, replace)
            except NameTaken as error:
                if is_unclear:
                    raise FileExistsError(error.errno, error.strerror, error.filename) from None
                raise
            except OSError as error:
                if is_unclear:
                    raise
                raise NotCommitted(error.errno, error.strerror, error.filename) from error
            is_written = standing == data or self.put(name, data, generation)
            if is_written:
                self._take_back_if_swept(name, data, claim)
                return
            is_unclear = is_unclear or is_written is None
        kind = OSError if is_unclear else NotCommitted
        raise kind(
            errno.EAGAIN, f"lost the race for it {COMMIT_TRIES} times", f"{self.root}/{name}"
        )

    def _before_commit(self, name: str, data: bytes, claim: str, replace: bool) -> Versioned:
        """Returns what stands at the name, which may be replaced, and its generation.

        Raises Fenced, NameTaken.
        """
        writer_id = claim.rpartition("/")[2]
        has_claim = self.get(f"{claim}/claim.json")[0] is not None
        standing, generation = self.get(name)
        if standing is not None and says_the_same(standing, data):
            # An earlier try went through though its answer was lost. The writer may have been
            # fenced since: a refusal would have it delete packs that a record names.
            return data, generation
        if not has_claim:
            raise fenced(f"{self.root}/{claim}")
        if standing is not None:
            if writer_id in fenced_writers(standing):
                raise Fenced(
                    f"writer {writer_id} was fenced from {self.root}/{name}; open a new manager to"
                    " write again"
                )
            if not standing.startswith(TOMBSTONE) and not replace:
                raise NameTaken(errno.EEXIST, "Object exists", f"{self.root}/{name}")
        return standing, generation

    def _take_back_if_swept(self, name: str, data: bytes, claim: str) -> None:
        """Undoes a commit that came too late: its packs and the tombstone against it are gone.

        The claim stood when the commit began. Since then another writer has fenced this one, swept
        its packs, and replaced the tombstone by a step that was deleted again.
        """
        if self.get(f"{claim}/claim.json")[0] is not None:
            return
        writer_id = claim.rpartition("/")[2]
        folder = name.rpartition("/")[0]
        if any(f"-{writer_id}" in key for key in self.keys(f"{folder}/" if folder else "")):
            return  # fenced, but after the commit: a sweep touches nothing that a record names
        standing, generation = self.get(name)
        if standing == data:
            self.put(name, tombstone({writer_id}), generation)
        raise Fenced(
            f"writer {writer_id} was fenced from {self.root}/{name} and its packs were swept; open"
            " a new manager to write again"
        )


def fill(buffers: Buffers, data: Any) -> int:
    """Copies bytes into the buffers in turn; returns how many there were room for."""
    array = np.frombuffer(data, np.uint8)
    at = 0
    for buffer in buffers:
        if buffer.nbytes and at < len(array):
            part = array[at : at + buffer.nbytes]
            # numpy copies without the interpreter's lock, which all other reads need.
            np.copyto(np.frombuffer(buffer.cast("B"), np.uint8)[: len(part)], part)
            at += len(part)
    return at


def joined(name: str, size: int, parts: Iterable[Part]) -> bytearray:
    """Returns a whole file of its parts, which may come in any order."""
    value = bytearray(size)
    filled = 0
    memory = memoryview(value)  # to assign a slice of a bytearray copies it once more
    for offset, buffers in parts:
        for buffer in buffers:
            raw = buffer.cast("B") if buffer.nbytes else memoryview(b"")
            memory[offset : offset + raw.nbytes] = raw
            offset += raw.nbytes
            filled += raw.nbytes
    assert filled == size == len(value), f"{name}: the parts made {filled} bytes of {size}"
    return value


def _may_be_tombstone(entry: Entry) -> bool:
    """Says whether an entry has the name of a record, and is as short as a tombstone may be."""
    if entry.name.rpartition("/")[2] != RECORD_NAME or entry.name.count("/") > 1:
        return False
    return entry.size is None or entry.size <= TOMBSTONE_LIMIT_BYTES

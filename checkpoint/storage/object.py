"""Object stores as stores: gs://, gcs_grpc://, s3:// and memory://, through tensorstore's KvStore.

A commit is a conditional write: it goes through only if the record is as this writer last saw it,
absent or a tombstone. There are no locks and no renames; a claim is an object, renewed by its
writer, and to fence a writer is to delete its claim. A commit that had already checked its claim is
stopped by a tombstone: a sweep writes one, by the same conditional write, as the record of each
step that it deletes packs of. A tombstone is no record: it is hidden from listings and reads, and
the next writer of that step replaces it. It names the writers that may not. Where a record stands
(an overwrite did not come to its end) the sweep writes the record anew with those names in it, so
that it is no longer what the fenced writer saw.

A tombstone that is older than a claim may be is deleted, on stores that delete on a condition (not
S3, as tensorstore does it). Whoever had checked its claim before that, and comes after it, finds
after its commit that claim and packs are gone, and takes it back.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.coordination import Fenced

from ..errors import CheckpointError
from .base import Entry, NameTaken, Part, run_side_by_side
from .local import fenced
from .tombstone import RECORD_NAME, TOMBSTONE, fenced_writers, tombstone

OBJECT_BYTES = 256 << 20  # a value is written whole, from memory

CALL_S = 300.0  # for one request with all its retries

COMMIT_TRIES = 8  # each loss of the race means that another writer won one

_BEYOND_THE_END = ("OUT_OF_RANGE", "Content-Range")  # how drivers say that a range is not all there

HEAD_BYTES = 1 << 20  # of an object whose size is asked for: most that are asked for are shorter


class ObjectStorage:
    """A store below one prefix of a bucket. Safe for use from several threads.

    tensorstore's KvStore returns keys and values only. So entries have no size or time, `list`
    reads all keys below a folder (there is no delimiter), and `size` searches for the end of an
    object by reading single bytes.

    `url` is gs://bucket/path, gcs_grpc://bucket/path, s3://bucket/path or memory://name; what
    follows a `?` are further members of tensorstore's spec, such as
    `endpoint=http://127.0.0.1:9000&aws_region=us-east-1` for a server that speaks S3. Retries with
    back-off are tensorstore's.
    """

    max_file_bytes: int | None = OBJECT_BYTES
    max_concurrency: int = 16

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        self._url = url.split("?", 1)[0].rstrip("/")
        self._single_writer = single_writer
        self._kv, self._prefix = _open(url)

    @property
    def root(self) -> str:
        return self._url

    @property
    def single_writer(self) -> bool:
        """The promise that nobody else writes here."""
        return self._single_writer

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        value, filled = bytearray(size), 0
        memory = memoryview(value)  # to assign a slice of a bytearray copies it once more
        for offset, buffers in parts:
            for buffer in buffers:
                raw = buffer.cast("B") if buffer.nbytes else memoryview(b"")
                memory[offset : offset + raw.nbytes] = raw
                offset = offset + raw.nbytes
                filled = filled + raw.nbytes
        assert filled == size == len(value), f"{name}: the parts made {filled} bytes of {size}"
        self.put(name, value)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        data = memoryview(
            self._range(name, offset, offset + sum(buffer.nbytes for buffer in buffers))
        )
        at = 0
        for buffer in buffers:
            if buffer.nbytes and at < len(data):
                part = data[at : at + buffer.nbytes]
                buffer.cast("B")[: len(part)] = part
                at += len(part)
        return at

    def size(self, name: str) -> int:
        low = len(self._range(name, 0, HEAD_BYTES))
        if low < HEAD_BYTES:
            return low
        high = 2 * low
        while self._range(name, high - 1, high):
            low = high
            high = 2 * high
        while high - low > 1:  # `low` bytes are there, `high` are not
            middle = (low + high) // 2
            low, high = (middle, high) if self._range(name, middle - 1, middle) else (low, middle)
        return low

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        data = self._range(name, 0, limit_bytes + 1)
        if len(data) > limit_bytes:
            raise OverflowError(f"{self._url}/{name} has more than {limit_bytes} bytes")
        if data.startswith(TOMBSTONE):
            raise FileNotFoundError(errno.ENOENT, "No such object", f"{self._url}/{name}")
        return data

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        for attempt in range(COMMIT_TRIES):
            try:
                found, generation = self._before_commit(name, data, claim, replace)
            except NameTaken as error:
                if attempt:  # a try of ours may have been applied, replaced, and be applied again
                    raise FileExistsError(error.errno, error.strerror, error.filename) from None
                raise
            if found == data:
                return  # an earlier try went through though its answer was lost
            if self.put(name, data, generation):
                self._take_back_if_swept(name, data, claim)
                return
        raise OSError(
            errno.EAGAIN, f"lost the race for it {COMMIT_TRIES} times", f"{self._url}/{name}"
        )

    def _before_commit(
        self, name: str, data: bytes, claim: str, replace: bool
    ) -> tuple[bytes | None, bytes]:
        """Returns what stands at the name and its generation, once it may be replaced. Raises
        Fenced, NameTaken.
        """
        writer_id = claim.rpartition("/")[2]
        if self.get(f"{claim}/claim.json")[0] is None:
            raise fenced(f"{self._url}/{claim}")
        found, generation = self.get(name)
        if found is not None and found != data:
            if writer_id in fenced_writers(found):
                raise Fenced(
                    f"writer {writer_id} was fenced from {self._url}/{name}; open a new manager to"
                    " write again"
                )
            if not found.startswith(TOMBSTONE) and not replace:
                raise NameTaken(errno.EEXIST, "Object exists", f"{self._url}/{name}")
        return found, generation

    def _take_back_if_swept(self, name: str, data: bytes, claim: str) -> None:
        """Undoes a commit that came so late that its packs, and the tombstone that should have
        stopped it, are gone.
        """
        if self.get(f"{claim}/claim.json")[0] is not None:
            return
        writer_id, folder = claim.rpartition("/")[2], name.rpartition("/")[0]
        if any(f"-{writer_id}" in key for key in self.keys(f"{folder}/" if folder else "")):
            return  # fenced, but after the commit: a sweep touches nothing that a record names
        found, generation = self.get(name)
        if found == data:
            self.put(name, tombstone({writer_id}), generation)
        raise Fenced(
            f"writer {writer_id} was fenced from {self._url}/{name} and its packs were swept; open"
            " a new manager to write again"
        )

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        folder = folder.strip("/")
        prefix = f"{folder}/" if folder else ""
        names = self.keys(prefix)
        if not recursive:
            names = sorted(
                {
                    prefix + head + cut
                    for name in names
                    for head, cut, _ in [name[len(prefix) :].partition("/")]
                }
            )
        records = [
            name
            for name in names
            if name.rpartition("/")[2] == RECORD_NAME and name.count("/") <= 1
        ]
        hidden = set(
            itertools.compress(
                records, run_side_by_side(self._is_tombstone, records, self.max_concurrency)
            )
        )
        return [
            Entry(name, 0 if name.endswith("/") else None) for name in names if name not in hidden
        ]

    def delete(self, names: Sequence[str]) -> None:
        pending = [
            self._kv.write(self._prefix + name, None) for name in names if not name.endswith("/")
        ]
        for name, future in zip(names, pending, strict=False):
            _done(future, name)

    # --- what drivers need that read and write here themselves

    def kvstore(self, folder: str) -> dict[str, Any]:
        """Returns tensorstore's JSON spec of a folder, to be opened in `context`."""
        spec: dict[str, Any] = self._kv.spec().to_json()
        path = "/".join(
            part
            for part in (spec.get("path", "").strip("/"), self._prefix.strip("/"), folder)
            if part
        )
        return dict(spec, path=f"{path}/" if path else "")

    @property
    def context(self) -> Any:
        """The tensorstore Context with this process's connections (and its memory:// stores)."""
        return _context()

    # --- what claims need besides

    def keys(self, prefix: str) -> Sequence[str]:
        """Returns all keys that begin so, sorted."""
        import tensorstore as ts

        whole = self._prefix + prefix
        found = _done(
            self._kv.list(
                ts.KvStore.KeyRange(whole, whole[:-1] + chr(ord(whole[-1]) + 1) if whole else "")
            ),
            prefix,
        )
        names = (key.decode() for key in found)
        return sorted(
            name[len(self._prefix) :] for name in names if name.startswith(whole)
        )  # some servers ignore the range

    def get(self, name: str) -> tuple[bytes | None, bytes]:
        """Returns a value (None: there is none) and its generation."""
        found = _done(self._kv.read(self._prefix + name), name)
        return (None if found.state == "missing" else bytes(found.value)), found.stamp.generation

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        """Writes a value, if its generation is still the one given; returns whether it was. A
        single writer sets no conditions.
        """
        key = self._prefix + name
        free = generation is None or self._single_writer
        written = _done(
            self._kv.write(key, data) if free else self._kv.write(key, data, if_equal=generation),
            name,
        )
        return free or bool(written.generation)

    def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
        """Starts to write all values, each if the generation is still the one given; returns how
        many were written.
        """
        pending = [
            self._kv.write(self._prefix + name, value, if_equal=generation) for value in values
        ]
        return sum(bool(_done(write, name).generation) for write in pending)

    @property
    def deletes_on_condition(self) -> bool:
        """Whether `remove` is one step: on S3 tensorstore checks first and deletes then."""
        return self._single_writer or not self._url.startswith("s3://")

    def remove(self, name: str, generation: bytes) -> None:
        """Deletes a value if its generation is still the one given."""
        key = self._prefix + name
        _done(
            (
                self._kv.write(key, None)
                if self._single_writer
                else self._kv.write(key, None, if_equal=generation)
            ),
            name,
        )

    def _range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop` or to the end of the object."""
        for end in (stop, None):
            future = self._kv.read(self._prefix + name, byte_range=slice(start, end))
            try:
                found = future.result(CALL_S)
            except Exception as error:
                if not any(sign in str(error) for sign in _BEYOND_THE_END):
                    raise OSError(errno.EIO, str(error), name) from error
                continue  # the object ends before `stop`, or before `start`
            if found.state == "missing":
                raise FileNotFoundError(errno.ENOENT, "No such object", f"{self._url}/{name}")
            return bytes(found.value)
        return b""

    def _is_tombstone(self, name: str) -> bool:
        try:
            return self._range(name, 0, len(TOMBSTONE)) == TOMBSTONE
        except FileNotFoundError:
            return True


def _open(url: str) -> tuple[Any, str]:
    """Returns the KvStore of a whole bucket, and what every key of this store begins with."""
    import tensorstore as ts

    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    spec: dict[str, Any] = dict(parse_qsl(parts.query))
    if parts.scheme == "memory":
        path = "/".join(part for part in (parts.netloc, path) if part)
        spec |= {"driver": "memory"}
    elif parts.scheme in ("gs", "gcs_grpc", "s3"):
        spec |= {"driver": {"gs": "gcs"}.get(parts.scheme, parts.scheme), "bucket": parts.netloc}
        if (
            parts.scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ
        ):  # first in AWS's own order too, which complains of what it lacks
            spec.setdefault("aws_credentials", {"type": "environment"})
    else:
        raise ValueError(f"{url}: expected a folder, gs://, gcs_grpc://, s3://, az:// or memory://")
    try:
        return ts.KvStore.open(spec, context=_context()).result(), f"{path}/" if path else ""
    except Exception as error:
        raise CheckpointError(f"cannot open {url}: {error}", path=url) from error


@cache
def _context() -> Any:
    """Returns the context that all stores of this process share: one memory:// and one pool of
    connections.
    """
    import tensorstore as ts

    return ts.Context()


def _done(future: Any, name: str) -> Any:
    try:
        return future.result(CALL_S)
    except Exception as error:
        raise OSError(errno.EIO, str(error), name) from error

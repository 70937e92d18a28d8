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
from .base import ConditionalWrites, Entry, NameTaken, Part, TensorStoreAccess
from .local import fenced
from .threads import run_side_by_side
from .tombstone import RECORD_NAME, TOMBSTONE, fenced_writers, tombstone

OBJECT_BYTES = 256 << 20  # a value is written whole, from memory

CALL_S = 300.0  # for one request with all its retries

COMMIT_TRIES = 8  # each loss of the race means that another writer won one

_BEYOND_THE_END = ("OUT_OF_RANGE", "Content-Range")  # how drivers say that a range is not all there

HEAD_BYTES = 1 << 20  # of an object whose size is asked for: most that are asked for are shorter


class ObjectStorage:
    """A store below one prefix of a bucket. Thread-safe.

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
    posix = None

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        self._url = url.split("?", 1)[0].rstrip("/")
        self._single_writer = single_writer
        self._kv, self._prefix = _open(url)

    @property
    def root(self) -> str:
        return self._url

    @property
    def conditions(self) -> ConditionalWrites:
        return self

    @property
    def tensorstore(self) -> TensorStoreAccess | None:
        return self

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
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
        self.put(name, value)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        wanted = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._range(name, offset, offset + wanted))
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
            if self._range(name, middle - 1, middle):
                low = middle
            else:
                high = middle
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
                standing, generation = self._before_commit(name, data, claim, replace)
            except NameTaken as error:
                # A try of this call may have been applied and replaced, and be applied again.
                if attempt:
                    raise FileExistsError(error.errno, error.strerror, error.filename) from None
                raise
            if standing == data:
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
        """Returns what stands at the name, which may be replaced, and its generation.

        Raises Fenced, NameTaken.
        """
        writer_id = claim.rpartition("/")[2]
        if self.get(f"{claim}/claim.json")[0] is None:
            raise fenced(f"{self._url}/{claim}")
        standing, generation = self.get(name)
        if standing is not None and standing != data:
            if writer_id in fenced_writers(standing):
                raise Fenced(
                    f"writer {writer_id} was fenced from {self._url}/{name}; open a new manager to"
                    " write again"
                )
            if not standing.startswith(TOMBSTONE) and not replace:
                raise NameTaken(errno.EEXIST, "Object exists", f"{self._url}/{name}")
        return standing, generation

    def _take_back_if_swept(self, name: str, data: bytes, claim: str) -> None:
        """Undoes a commit that came too late: its packs and the tombstone against it are gone.

        The claim stood when the commit began. Since then another writer has fenced this one, swept
        its packs, and deleted the tombstone once that was old.
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
            names = sorted({_first_part(name, len(prefix)) for name in names})
        records = [name for name in names if _is_record_name(name)]
        are_tombstones = run_side_by_side(self._is_tombstone, records, self.max_concurrency)
        hidden = set(itertools.compress(records, are_tombstones))
        return [
            Entry(name, 0 if name.endswith("/") else None) for name in names if name not in hidden
        ]

    def delete(self, names: Sequence[str]) -> None:
        files = [name for name in names if not name.endswith("/")]
        pending = [self._kv.write(self._prefix + name, None) for name in files]
        for name, future in zip(files, pending, strict=True):
            _done(future, name)

    # --- What tensorstore opens

    def kvstore(self, folder: str) -> dict[str, Any]:
        spec: dict[str, Any] = self._kv.spec().to_json()
        parts = (spec.get("path", "").strip("/"), self._prefix.strip("/"), folder)
        path = "/".join(part for part in parts if part)
        return dict(spec, path=f"{path}/" if path else "")

    @property
    def context(self) -> Any:
        return _context()

    # --- Writes on conditions

    @property
    def single_writer(self) -> bool:
        return self._single_writer

    @property
    def deletes_on_condition(self) -> bool:
        # On S3 tensorstore checks first and deletes then.
        return self._single_writer or not self._url.startswith("s3://")

    def keys(self, prefix: str) -> Sequence[str]:
        import tensorstore as ts

        whole = self._prefix + prefix
        end = whole[:-1] + chr(ord(whole[-1]) + 1) if whole else ""
        keys = _done(self._kv.list(ts.KvStore.KeyRange(whole, end)), prefix)
        names = (key.decode() for key in keys)
        # Some servers ignore the range.
        return sorted(name[len(self._prefix) :] for name in names if name.startswith(whole))

    def get(self, name: str) -> tuple[bytes | None, bytes]:
        read = _done(self._kv.read(self._prefix + name), name)
        value = None if read.state == "missing" else bytes(read.value)
        return value, read.stamp.generation

    def put(self, name: str, data: bytes | bytearray, generation: bytes | None = None) -> bool:
        key = self._prefix + name
        if generation is None or self._single_writer:
            _done(self._kv.write(key, data), name)
            return True
        return bool(_done(self._kv.write(key, data, if_equal=generation), name).generation)

    def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
        key = self._prefix + name
        pending = [self._kv.write(key, value, if_equal=generation) for value in values]
        return sum(bool(_done(write, name).generation) for write in pending)

    def remove(self, name: str, generation: bytes) -> None:
        key = self._prefix + name
        if self._single_writer:
            _done(self._kv.write(key, None), name)
        else:
            _done(self._kv.write(key, None, if_equal=generation), name)

    def _range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop` or to the end of the object."""
        for end in (stop, None):
            future = self._kv.read(self._prefix + name, byte_range=slice(start, end))
            try:
                read = future.result(CALL_S)
            except Exception as error:
                if not any(sign in str(error) for sign in _BEYOND_THE_END):
                    raise OSError(errno.EIO, str(error), name) from error
                continue  # the object ends before `stop`, or before `start`
            if read.state == "missing":
                raise FileNotFoundError(errno.ENOENT, "No such object", f"{self._url}/{name}")
            return bytes(read.value)
        return b""

    def _is_tombstone(self, name: str) -> bool:
        try:
            return self._range(name, 0, len(TOMBSTONE)) == TOMBSTONE
        except FileNotFoundError:
            return True


def _first_part(name: str, skip: int) -> str:
    """Returns a name up to the first `/` after its first `skip` characters, that `/` included."""
    head, slash, _ = name[skip:].partition("/")
    return name[:skip] + head + slash


def _is_record_name(name: str) -> bool:
    return name.rpartition("/")[2] == RECORD_NAME and name.count("/") <= 1


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
        # The environment comes first in AWS's own order too, which complains of what it lacks.
        if parts.scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ:
            spec.setdefault("aws_credentials", {"type": "environment"})
    else:
        raise ValueError(f"{url}: expected a folder, gs://, gcs_grpc://, s3://, az:// or memory://")
    try:
        return ts.KvStore.open(spec, context=_context()).result(), f"{path}/" if path else ""
    except Exception as error:
        raise CheckpointError(f"cannot open {url}: {error}", path=url) from error


@cache
def _context() -> Any:
    """Returns the context of all stores of this process: one memory://, one pool of connections."""
    import tensorstore as ts

    return ts.Context()


def _done(future: Any, name: str) -> Any:
    try:
        return future.result(CALL_S)
    except Exception as error:
        raise OSError(errno.EIO, str(error), name) from error

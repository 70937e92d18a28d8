"""Object stores through tensorstore's KvStore: gs:// and gcs_grpc://."""

from __future__ import annotations

import bisect
import errno
from collections.abc import Sequence
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

from ..errors import CheckpointError
from .base import Entry, TensorStoreAccess, Versioned
from .object import ObjectStorage, split_url

CALL_S = 300.0  # for one request with all its retries

HEAD_BYTES = 1 << 20  # of an object whose size is asked for: most that are asked for are shorter

_BEYOND_THE_END = ("OUT_OF_RANGE", "Content-Range")  # how drivers say that a range is not all there


class KvStoreStorage(ObjectStorage):
    """A store below one prefix of a bucket of Google's. Thread-safe.

    tensorstore's KvStore returns keys and whole values only. So entries have no size or time, a
    listing reads all keys below a folder (there is no delimiter), and `size` searches for the end
    of an object by reading single bytes. Retries with back-off are tensorstore's.

    What follows a `?` in the URL are further members of tensorstore's spec.
    """

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        super().__init__(url, single_writer=single_writer)
        spec = kvstore_spec(url)
        self._kv = _opened(url, spec)
        # What the first try refuses was not written. A later one says nothing of those before.
        self._kv_once = self._kv
        if spec["driver"] != "memory":
            self._kv_once = _opened(url, {**spec, "gcs_request_retries": {"max_retries": 0}})

    @property
    def tensorstore(self) -> TensorStoreAccess | None:
        return self

    def size(self, name: str) -> int:
        low = len(self._range(name, 0, HEAD_BYTES))
        if low < HEAD_BYTES:
            return low
        high = 2 * low
        while self._range(name, high - 1, high):
            low = high
            high = 2 * high
        return low + bisect.bisect_left(
            range(low, high), True, key=lambda at: not self._range(name, at, at + 1)
        )

    def delete(self, names: Sequence[str]) -> None:
        pending = {
            name: self._kv.write(self._prefix + name, None)
            for name in names
            if not name.endswith("/")
        }
        for name, future in pending.items():
            _done(future, name)

    def _entries(self, folder: str, *, recursive: bool) -> list[Entry]:
        names = self.keys(folder)
        if not recursive:
            names = sorted({_first_part(name, len(folder)) for name in names})
        return [Entry(name, 0 if name.endswith("/") else None) for name in names]

    def keys(self, prefix: str) -> Sequence[str]:
        import tensorstore as ts

        whole = self._prefix + prefix
        end = whole[:-1] + chr(ord(whole[-1]) + 1) if whole else ""
        keys = _done(self._kv.list(ts.KvStore.KeyRange(whole, end)), prefix)
        names = (key.decode() for key in keys)
        # Some servers ignore the range.
        return sorted(name[len(self._prefix) :] for name in names if name.startswith(whole))

    # --- What tensorstore opens

    def kvstore(self, folder: str) -> dict[str, Any]:
        spec: dict[str, Any] = self._kv.spec().to_json()
        parts = (spec.get("path", "").strip("/"), self._prefix.strip("/"), folder)
        path = "/".join(part for part in parts if part)
        return dict(spec, path=f"{path}/" if path else "")

    @property
    def context(self) -> Any:
        return tensorstore_context()

    # --- Writes on conditions

    def get(self, name: str) -> Versioned:
        read = _done(self._kv.read(self._prefix + name), name)
        value = None if read.state == "missing" else bytes(read.value)
        return value, read.stamp.generation

    def put(
        self, name: str, data: bytes | bytearray, generation: bytes | None = None
    ) -> bool | None:
        key = self._prefix + name
        if generation is None or self.single_writer:
            _done(self._kv.write(key, data), name)
            return True
        try:
            return bool(_done(self._kv_once.write(key, data, if_equal=generation), name).generation)
        except OSError:
            again = _done(self._kv.write(key, data, if_equal=generation), name)
            return True if again.generation else None

    def _range(self, name: str, start: int, stop: int) -> bytes:
        for end in (stop, None):
            future = self._kv.read(self._prefix + name, byte_range=slice(start, end))
            try:
                read = future.result(CALL_S)
            except Exception as error:
                if not any(sign in str(error) for sign in _BEYOND_THE_END):
                    raise OSError(errno.EIO, str(error), name) from error
                continue  # the object ends before `stop`, or before `start`
            if read.state == "missing":
                raise self._missing(name)
            return bytes(read.value)
        return b""


def kvstore_spec(url: str) -> dict[str, Any]:
    """Returns tensorstore's spec of the whole bucket of a URL."""
    scheme, bucket, _, query = split_url(url)
    spec: dict[str, Any] = dict(parse_qsl(query))
    if scheme == "memory":
        spec |= {"driver": "memory"}
    else:
        spec |= {"driver": {"gs": "gcs"}.get(scheme, scheme), "bucket": bucket}
    return spec


def _opened(url: str, spec: dict[str, Any]) -> Any:
    import tensorstore as ts

    try:
        return ts.KvStore.open(spec, context=tensorstore_context()).result()
    except Exception as error:
        raise CheckpointError(f"cannot open {url}: {error}", path=url) from error


@cache
def tensorstore_context() -> Any:
    """Returns the context of all stores of this process, with one pool of connections."""
    import tensorstore as ts

    return ts.Context()


def _first_part(name: str, skip: int) -> str:
    """Returns a name up to the first `/` after its first `skip` characters, that `/` included."""
    head, slash, _ = name[skip:].partition("/")
    return name[:skip] + head + slash


def _done(future: Any, name: str) -> Any:
    try:
        return future.result(CALL_S)
    except Exception as error:
        raise OSError(errno.EIO, str(error), name) from error

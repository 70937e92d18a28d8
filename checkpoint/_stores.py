"""Which store and which claims a path means."""

from __future__ import annotations

import os

from ._claims import Claims, LocalClaims
from ._local import LocalStorage
from ._storage import Storage


def open_store(path: str | os.PathLike[str], *, single_writer: bool = False) -> tuple[Storage, Claims]:
    """Returns the store and the claims of a root: a folder, or a URL (gs://, s3://, memory://). Reads and writes nothing yet."""
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        from ._object import ObjectClaims, ObjectStorage

        storage = ObjectStorage(text, single_writer=single_writer)
        return storage, ObjectClaims(storage)
    local = LocalStorage(text.removeprefix("file://"), single_writer=single_writer)
    return local, LocalClaims(local, single_writer=single_writer)


__all__ = ["open_store"]

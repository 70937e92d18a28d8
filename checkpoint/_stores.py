"""Which store and which claims a path means."""

from __future__ import annotations

import os

from ._claims import Claims, LocalClaims
from ._local import LocalStorage
from ._options import DAY_S
from ._storage import Storage


def open_store(path: str | os.PathLike[str], *, single_writer: bool = False, claim_age_s: float = DAY_S) -> tuple[Storage, Claims]:
    """Returns the store and the claims of a root: a folder, or a URL (gs://, s3://, memory://). Reads and writes nothing yet."""
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        from ._object import ObjectClaims, ObjectStorage

        storage = ObjectStorage(text, single_writer=single_writer)
        return storage, ObjectClaims(storage, claim_age_s=claim_age_s)
    local = LocalStorage(text.removeprefix("file://"), single_writer=single_writer)
    return local, LocalClaims(local, single_writer=single_writer)


__all__ = ["open_store"]

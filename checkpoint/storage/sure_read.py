"""Reads of a step's files whose failure counts only where it stays."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import TypeVar

from ..errors import Corrupt
from .base import Readable
from .path import join

READ_TRIES = 3
T = TypeVar("T")


def read_surely(storage: Readable, name: str, read: Callable[[], T]) -> T:
    """Returns what `read` returns of a file of a store. Blocks as `read` does.

    On a disk "not found" and an I/O error count only after READ_TRIES tries, and where a listing
    agrees: a client of a shared file system may say either once. A file that is listed after all
    may be new, and is read once more. Raises FileNotFoundError for a file that is not listed
    either, Corrupt for one that is listed and has an I/O error, the store's OSError where that
    stays unclear.
    """
    if storage.posix is None:
        return read()
    for _ in range(READ_TRIES):
        try:
            return read()
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            if not is_missing and error.errno != errno.EIO:
                raise
            failure = error
    try:
        path = join(storage.root, name)
        try:
            is_there = is_listed(storage, name)
        except OSError as error:
            # An error of the file says more. Only "not found" says nothing without a listing.
            raise (error if is_missing else failure) from None
        if not is_there:
            raise failure
        if is_missing:
            with contextlib.suppress(FileNotFoundError):
                return read()
            raise OSError(errno.ESTALE, "it is listed, and cannot be opened", path) from failure
        raise Corrupt.at(path, f"it cannot be read: {failure.strerror}") from failure
    finally:
        # It holds this frame, and so the frames of all callers, with their arrays and managers.
        del failure


def read_head(storage: Readable, name: str, nbytes: int) -> bytearray:
    """Returns the first bytes of a file, zeros behind its end; one small read, as `read_surely`."""
    head = bytearray(nbytes)
    read_surely(storage, name, lambda: storage.read(name, 0, [memoryview(head)]))
    return head


def is_listed(storage: Readable, name: str) -> bool:
    """Says whether a listing of its folder shows a file."""
    return any(entry.name == name for entry in storage.list(name.rpartition("/")[0]))

"""Failures of a read that count, and those that do not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from holdfast.checkpoint import Corrupt
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.sure_read import READ_TRIES, read_surely

NAME = "2/checkpoint.json"


def failing(numbers: Sequence[int]) -> Callable[[], str]:
    """Returns a read that fails with these errors, one a call, and then succeeds."""
    left = list(numbers)

    def read() -> str:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number), NAME)
        return "read"

    return read


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    (tmp_path / "2").mkdir()
    (tmp_path / NAME).write_text("{}")
    return LocalStorage(tmp_path)


def test_what_goes_away_does_not_count(storage: LocalStorage) -> None:
    """Fewer failures than tries are none; an error of another kind is raised at once."""
    assert read_surely(storage, NAME, failing([errno.ENOENT, errno.EIO])) == "read"
    with pytest.raises(OSError, match="Too many open files"):
        read_surely(storage, NAME, failing([errno.EMFILE]))


def test_what_came_while_it_was_looked_for_is_read(storage: LocalStorage) -> None:
    """A record that another writer made after the last try, and before the listing."""
    assert read_surely(storage, NAME, failing([errno.ENOENT] * READ_TRIES)) == "read"


def test_a_listing_says_what_stays(storage: LocalStorage) -> None:
    """A listed file is damaged by an I/O error, and not gone; one that is not listed is gone."""
    with pytest.raises(Corrupt, match=f"{NAME}: it cannot be read: Input/output error"):
        read_surely(storage, NAME, failing([errno.EIO] * READ_TRIES))
    with pytest.raises(OSError, match="it is listed, and cannot be opened") as unclear:
        read_surely(storage, NAME, failing([errno.ENOENT] * (READ_TRIES + 1)))
    assert unclear.value.errno == errno.ESTALE
    for number in (errno.ENOENT, errno.EIO):
        with pytest.raises(OSError, match=r"\[Errno") as gone:
            read_surely(storage, "3/checkpoint.json", failing([number] * READ_TRIES))
        assert gone.value.errno == number


def test_without_a_listing_nothing_is_gone(storage: LocalStorage) -> None:
    """Where the folder cannot be listed, the listing's error is raised for a file not found."""

    class Unlisted(LocalStorage):
        def list(
            self, folder: str, *, recursive: bool = False, names_only: bool = False
        ) -> list[Entry]:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), folder)

    unlisted = Unlisted(storage.path)
    with pytest.raises(PermissionError):
        read_surely(unlisted, NAME, failing([errno.ENOENT] * READ_TRIES))
    with pytest.raises(OSError, match="Input/output error"):
        read_surely(unlisted, NAME, failing([errno.EIO] * READ_TRIES))


def test_an_object_store_is_believed() -> None:
    """What it does not find, or fails at, is tried once: it has its own retries."""
    with pytest.raises(FileNotFoundError):
        read_surely(BucketStorage("memory://sure-read"), NAME, failing([errno.ENOENT]))

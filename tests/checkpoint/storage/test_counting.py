"""The counting store: every byte that is read or written is reported, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.storage.base import Storage
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage


def test_bytes_are_reported_and_passed_on(tmp_path: Path) -> None:
    """Reads report what was there, writes each part once it is written; what the other store says
    comes through.
    """
    inner = LocalStorage(tmp_path)
    reported: list[int] = []
    storage: Storage = CountingStorage(inner, reported.append)
    storage.write("a/b", 6, [(2, [memoryview(b"cd"), memoryview(b"ef")]), (0, [memoryview(b"ab")])])
    assert reported == [4, 2] and (tmp_path / "a/b").read_bytes() == b"abcdef"
    assert (
        storage.read("a/b", 4, [memoryview(bytearray(9))]) == 2
        and storage.fetch("a/b", 6) == b"abcdef"
    )
    assert reported == [4, 2, 2, 6] and storage.size("a/b") == 6
    assert (storage.root, storage.max_file_bytes, storage.max_concurrency) == (
        inner.root,
        inner.max_file_bytes,
        inner.max_concurrency,
    )
    assert storage.list("a") == inner.list("a") and [
        entry.name for entry in storage.list("", recursive=True)
    ] == ["a/b"]
    (tmp_path / "claim").mkdir()
    storage.commit("c", b"record", "claim")
    storage.delete(["a/b"])
    assert (
        (tmp_path / "c").read_bytes() == b"record"
        and storage.list("a") == []
        and reported == [4, 2, 2, 6]
    )


def test_errors_come_through_and_report_nothing(tmp_path: Path) -> None:
    """A missing file is the other store's error, and no byte of it is reported."""
    reported: list[int] = []
    storage = CountingStorage(LocalStorage(tmp_path), reported.append)
    with pytest.raises(FileNotFoundError):
        storage.read("none", 0, [memoryview(bytearray(1))])
    with pytest.raises(FileNotFoundError):
        storage.fetch("none", 1)
    assert reported == []

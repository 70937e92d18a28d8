"""Buckets through tensorstore: sizes that are searched, names without times, and its own specs.

tests/checkpoint/storage/test_storage.py runs the whole contract of stores on it.
"""

from __future__ import annotations

import pytest

from holdfast.checkpoint import CheckpointError
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.kvstore import HEAD_BYTES, KvStoreStorage, kvstore_spec
from holdfast.checkpoint.storage.object import split_url


@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, 3 * HEAD_BYTES + 17])
def test_a_size_is_searched(size: int) -> None:
    """A short object is read whole for it; the end of a long one is found by single bytes."""
    storage = KvStoreStorage("memory://kvstore/sizes")
    storage.put("a", bytes(size))
    assert storage.size("a") == size


def test_entries_have_no_size_and_no_time() -> None:
    """A listing has names alone."""
    storage = KvStoreStorage("memory://kvstore/names")
    for name in ("1/a", "1/b/c", "2/d"):
        storage.put(name, b"value")
    assert storage.list("1") == [Entry("1/a", None), Entry("1/b/", 0)]
    assert storage.list("", recursive=True) == [
        Entry("1/a", None),
        Entry("1/b/c", None),
        Entry("2/d", None),
    ]


def test_a_url_is_a_spec_of_tensorstore() -> None:
    """What follows a question mark is part of it; one that tensorstore does not take is refused."""
    spec = {"driver": "gcs", "bucket": "bucket", "user_project": "mine"}
    assert kvstore_spec("gs://bucket/a/b?user_project=mine") == spec
    assert kvstore_spec("gs://bucket/a#b/c%20d?user_project=mine") == spec
    assert split_url("gs://bucket/a/b?user_project=mine")[2] == "a/b/"
    assert split_url("gs://bucket/a#b/c%20d?user_project=mine")[2] == "a#b/c%20d/"
    with pytest.raises(CheckpointError, match=r"cannot open gs://bucket/a\?no_such=1: .*no_such"):
        KvStoreStorage("gs://bucket/a?no_such=1")

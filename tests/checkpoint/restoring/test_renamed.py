"""Leaves under other names are read as before."""

from __future__ import annotations

import numpy as np

from holdfast.checkpoint.layouts.base import read_leaves
from holdfast.checkpoint.restoring.renamed import renamed
from tests.support.array_readers import MemoryReader, item_of

ARRAYS = {
    "a.w": np.arange(12.0).reshape(3, 4),
    "a.b": np.arange(3),
    "ab": np.zeros((0, 2), np.int8),
    "c": np.float16(2.5) * np.ones(()),
}


def test_a_renamed_item_reads_as_before() -> None:
    """New paths lead to the old leaves' values; the tree becomes a flat dict of the new paths."""
    new, reader = renamed(
        item_of(ARRAYS), MemoryReader(ARRAYS), lambda path: path.replace(".", "/")
    )
    assert [leaf.path for leaf in new.leaves] == ["a/w", "a/b", "ab", "c"] == new.tree["keys"]
    found = {leaf.path: array for leaf, array in read_leaves(reader, new.leaves)}
    assert all(
        found[path.replace(".", "/")].tobytes() == array.tobytes() for path, array in ARRAYS.items()
    )

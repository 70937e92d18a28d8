"""What readers of all layouts share: batches, renaming, records of arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import StepNotFound
from holdfast.checkpoint.layouts.base import (
    array_record,
    find_named,
    leaves_below,
    read_leaves,
    total_bytes,
    verify_by_reading,
)
from holdfast.checkpoint.layouts.detect import open_checkpoint
from tests.support.array_readers import MemoryReader, item_of
from tests.support.layouts import write

ARRAYS = {
    "a.w": np.arange(12.0).reshape(3, 4),
    "a.b": np.arange(3),
    "ab": np.zeros((0, 2), np.int8),
    "c": np.float16(2.5) * np.ones(()),
}


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_batches_are_bounded(sizes: list[int], batch_bytes: int) -> None:
    """Every leaf comes once, in order; a batch is of at most `batch_bytes`, or of one leaf that is
    larger (and empty ones).
    """
    arrays = {f"w{index}": np.full(size, index, np.uint8) for index, size in enumerate(sizes)}
    reader = MemoryReader(arrays)
    found = [
        (leaf.path, array.tolist())
        for leaf, array in read_leaves(reader, item_of(arrays).leaves, batch_bytes=batch_bytes)
    ]
    assert found == [(path, array.tolist()) for path, array in arrays.items()]
    for batch in reader.batches:
        assert (
            sum(read.nbytes for read in batch) <= batch_bytes
            or len([read for read in batch if read.nbytes]) == 1
        )


def test_leaves_below_a_path() -> None:
    """A path is a leaf or a subtree, never the beginning of another name."""
    item = item_of(ARRAYS)
    assert [[leaf.path for leaf in leaves_below(item, path)] for path in ("", "a", "a.w", "b")] == [
        list(ARRAYS),
        ["a.w", "a.b"],
        ["a.w"],
        [],
    ]


def test_records_of_arrays_of_other_layouts() -> None:
    """An array is one shard, and without chunks it is the least that is read."""
    grids = [
        array_record("w", "array", (4, 6), "int8", chunk_shape=chunk).grid
        for chunk in (None, (1, 1))
    ]
    assert [(grid.shard_shape, grid.chunk_shape) for grid in grids if grid] == [
        ((4, 6), (4, 6)),
        ((4, 6), (1, 1)),
    ]


def test_verifying_by_reading_counts_what_it_read(tmp_path: Path) -> None:
    """All leaves are read once, and the report has their number and bytes; a missing item names
    those that are there.
    """
    checkpoint = open_checkpoint(write("safetensors", str(tmp_path)))
    report = verify_by_reading(checkpoint, 1)
    assert (report.files, report.leaves, report.bytes) == (
        1,
        3,
        total_bytes(checkpoint),
    ) and report.bytes == 60 * 4 + 4 + 2
    with pytest.raises(StepNotFound, match="has no item 'x'; it has: state"):
        find_named(checkpoint.info, checkpoint.info.items, "x")

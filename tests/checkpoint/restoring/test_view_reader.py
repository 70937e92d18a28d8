"""The reader of views: what it reads, what it tells before, and what goes straight through."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from holdfast.checkpoint import Stack
from holdfast.checkpoint.layouts.base import fresh
from holdfast.checkpoint.restoring.array_views import SavedArray
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.surgery import operate
from holdfast.checkpoint.restoring.view_reader import BATCH_BYTES, ViewReader
from tests.support.array_readers import MemoryReader, item_of, record_of


def test_only_what_is_asked_for_is_read() -> None:
    """A layer of a stack of large leaves reads that layer alone, and at most a batch is held."""
    arrays = {f"l.{place}": np.full((BATCH_BYTES // 4 + 1,), place, np.float32) for place in (0, 1)}
    reader = MemoryReader(arrays)
    item, made = operate(item_of(arrays), reader, {r"l\.(\d)": Stack("l")})
    (leaf,) = item.leaves
    read = ReadRequest(leaf, ((1, 2), (0, leaf.shape[1])))
    made.fill([read], fresh)
    assert [[each.leaf.path for each in batch] for batch in reader.batches] == [["l.1"]]
    reader.batches.clear()
    made.fill([ReadRequest(leaf, ((0, 2), (0, leaf.shape[1])))], fresh)
    assert [len(batch) for batch in reader.batches] == [1, 1]


class Foreseeing(MemoryReader):
    """Keeps what it was told before."""

    def foresee(self, reads: Iterable[ReadRequest]) -> None:
        self.told = [(read.leaf.path, read.region) for read in reads]


def test_what_is_stored_as_it_is_asked_for_is_read_straight() -> None:
    """A leaf by another path, a row of one, and a leaf without a view: one call reads all, into the
    memory that stays; and it was told before.
    """
    arrays = {"a": np.arange(6).reshape(2, 3), "rows": np.arange(12).reshape(3, 4)}
    reader = Foreseeing(arrays)
    leaves = {path: record_of(path, array) for path, array in arrays.items()}
    views = {"b": SavedArray.of(leaves["a"]), "rows": SavedArray.row_of(leaves["rows"], 1)}
    made = ViewReader(reader, views)
    reads = [
        ReadRequest(record_of("b", arrays["a"]), ((0, 2), (1, 3))),
        ReadRequest(record_of("rows", arrays["rows"][1]), ((2, 4),)),
        ReadRequest(leaves["a"], ((0, 1), (0, 3))),
    ]
    made.foresee(reads)
    made.fill(reads, fresh)
    (batch,) = reader.batches
    assert [(read.leaf.path, read.region) for read in batch] == reader.told
    assert reader.told == [
        ("a", ((0, 2), (1, 3))),
        ("rows", ((1, 2), (2, 4))),
        ("a", ((0, 1), (0, 3))),
    ]
    found = [read.array for read in reads]
    assert all(array is not None for array in found)
    assert [array.tolist() for array in found if array is not None] == [
        [[1, 2], [4, 5]],
        [6, 7],
        [[0, 1, 2]],
    ]

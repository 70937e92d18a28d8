"""The reader of views: what it reads, what it tells before, and what goes straight through."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from holdfast.checkpoint import Stack
from holdfast.checkpoint.restoring.array_views import SavedArray
from holdfast.checkpoint.restoring.devices import Region
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.surgery import operate
from holdfast.checkpoint.restoring.view_reader import (
    BATCH_BYTES,
    HeldChunks,
    ViewReader,
    Wanted,
    fresh,
    read_in_order,
)
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
    views = {"b": SavedArray.of(leaves["a"]), "rows": SavedArray.of(leaves["rows"], ((1, 2),))}
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


ARRAYS = {"a": np.arange(12).reshape(3, 4), "b": np.arange(6)}
LEAVES = {path: record_of(path, array) for path, array in ARRAYS.items()}
WHOLE: Region = ((0, 3), (0, 4))


def column(place: int) -> Wanted:
    """Returns a column of `a`, which is read whole for it."""
    return Wanted(LEAVES["a"], ((0, 3), (place, place + 1)), WHOLE)


def straight(path: str, *region: tuple[int, int]) -> Wanted:
    """Returns a region that is read by itself."""
    return Wanted(LEAVES[path], region, region)


def test_what_is_read_whole_is_read_once_for_all_that_lies_in_it() -> None:
    """Also for those that come after others, and in the next call; all comes in its order."""
    reader = MemoryReader(ARRAYS)
    held = HeldChunks()
    wanted = [
        straight("b", (0, 2)),
        straight("b", (4, 6)),
        column(0),
        straight("b", (2, 3)),
        column(3),
    ]
    found = [array.tolist() for array in read_in_order(reader, wanted, held=held)]
    assert found == [[0, 1], [4, 5], [[0], [4], [8]], [2], [[3], [7], [11]]]
    assert [len(batch) for batch in reader.batches] == [2, 1, 1]
    assert next(read_in_order(reader, [column(1)], held=held)).tolist() == [[1], [5], [9]]
    assert len(reader.batches) == 3


def test_what_could_not_be_read_is_not_held() -> None:
    """After an error the chunks that were held before, and those that failed, are read anew."""
    reader = MemoryReader(ARRAYS)
    held = HeldChunks()
    next(read_in_order(reader, [column(1)], held=held))
    array = reader.arrays.pop("b")
    with pytest.raises(KeyError):
        next(read_in_order(reader, [Wanted(LEAVES["b"], ((0, 1),), ((0, 6),))], held=held))
    reader.arrays["b"] = array
    found = read_in_order(reader, [Wanted(LEAVES["b"], ((1, 2),), ((0, 6),)), column(1)], held=held)
    assert [each.tolist() for each in found] == [[1], [[1], [5], [9]]]

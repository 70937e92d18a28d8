"""The reader of an item: any region of any leaf, in few reads, each chunk checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import save
from holdfast.checkpoint.format.record import ItemRecord, read_record
from holdfast.checkpoint.restoring.reader import RANGE_BYTES, STEP_BYTES, ItemReader, ReadRequest
from holdfast.checkpoint.restoring.restore import allocate
from holdfast.checkpoint.storage.local import LocalStorage


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in bounds)


ARRAYS = {
    "big": np.arange((9 << 20) // 2, dtype=np.uint16).reshape(9, 1 << 10, -1),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float64(2.5),
    **{f"small{i}": np.arange(i * 7, dtype=np.int16) for i in range(40)},
}


class Reads(LocalStorage):
    """A local store that keeps (offset, bytes) of its reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []

    def read(self, name: str, offset: int, buffers: Any) -> int:
        self.reads.append((offset, sum(buffer.nbytes for buffer in buffers)))
        return super().read(name, offset, buffers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reads, ItemRecord]:
    root = tmp_path_factory.mktemp("item")
    save(root, ARRAYS)
    storage = Reads(root)
    return storage, read_record(storage, "").items["state"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_regions_are_read_exactly(saved: tuple[Reads, ItemRecord], data: st.DataObject) -> None:
    """Whatever regions of whatever leaves are asked for together, overlapping ones and empty ones too, each is numpy's slice."""
    storage, item = saved
    leaves = data.draw(st.lists(st.sampled_from(item.leaves), min_size=1, max_size=6))
    reads = [ReadRequest(leaf, data.draw(regions(leaf.shape))) for leaf in leaves]
    ItemReader(storage, "", item).fill(reads, allocate)
    for read in reads:
        expected = np.asarray(ARRAYS[read.leaf.path])[tuple(slice(*bounds) for bounds in read.region)]
        assert read.array is not None and read.array.shape == expected.shape and read.array.tobytes() == expected.tobytes()


def test_small_chunks_are_read_together(saved: tuple[Reads, ItemRecord]) -> None:
    """Forty small leaves, which lie side by side, cost two reads besides the checks of the header."""
    storage, item = saved
    reader = ItemReader(storage, "", item)
    reader.load_headers(range(len(item.files)))
    storage.reads.clear()
    reads = [ReadRequest(leaf, ((0, leaf.shape[0]),)) for leaf in item.leaves if leaf.path.startswith("small")]
    reader.fill(reads, allocate)
    assert len(reads) == 40 and len(storage.reads) <= 2
    assert all(read.array is not None and read.array.tobytes() == ARRAYS[read.leaf.path].tobytes() for read in reads)


def test_headers_are_read_once(saved: tuple[Reads, ItemRecord]) -> None:
    """What is known of a pack is not read again."""
    storage, item = saved
    reader = ItemReader(storage, "", item)
    first = dict(reader.load_headers([0]))
    storage.reads.clear()
    assert reader.load_headers([0]) == first and storage.reads == []


def test_groups_are_bounded(saved: tuple[Reads, ItemRecord]) -> None:
    """No read is longer than a large chunk's step or a range of small ones."""
    storage, item = saved
    storage.reads.clear()
    ItemReader(storage, "", item).check_all()
    assert max(nbytes for _, nbytes in storage.reads) <= max(RANGE_BYTES, STEP_BYTES)
    assert sum(nbytes for _, nbytes in storage.reads) >= sum(np.asarray(array).nbytes for array in ARRAYS.values())

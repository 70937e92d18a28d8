"""An ArrayReader over arrays in memory, and the records that describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.format.record import ItemRecord, LeafRecord
from holdfast.checkpoint.restoring.reader import ReadRequest


class MemoryReader:
    """Fills requests from arrays by their leaves' paths, and keeps what it was asked for in
    `batches`.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.arrays = dict(arrays)
        self.batches: list[list[ReadRequest]] = []

    def fill(
        self, reads: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]
    ) -> None:
        """Gives every request its array."""
        self.batches.append(list(reads))
        for read in reads:
            found = self.arrays[read.leaf.path][tuple(slice(*bounds) for bounds in read.region)]
            memory = allocate(read.nbytes).view(read.leaf.numpy_dtype).reshape(read.shape)
            memory[...] = found
            read.array = memory


def record_of(
    path: str, array: np.ndarray[Any, Any], chunk_shape: tuple[int, ...] | None = None, **facts: Any
) -> LeafRecord:
    """Returns the record of an array that is stored as one shard, in chunks of `chunk_shape` (None:
    one).
    """
    grid = Grid(array.shape, array.shape, chunk_shape or array.shape, array.itemsize)
    return LeafRecord(path, "array", array.dtype.name, array.shape, grid=grid, **facts)


def item_of(arrays: Mapping[str, np.ndarray[Any, Any]], name: str = "state") -> ItemRecord:
    """Returns an item that is a flat dict of arrays."""
    leaves = tuple(record_of(path, array) for path, array in arrays.items())
    return ItemRecord(
        name,
        "tree",
        (),
        {"kind": "dict", "keys": list(arrays), "nodes": list(range(len(leaves)))},
        leaves,
    )

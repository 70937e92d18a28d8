"""The reader of leaves that are made of stored ones, as views say.

A region of a leaf is made of the regions of stored ones that it needs, so that memory is bounded by
what is asked for at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..format.record import LeafRecord
from .array_views import Read, SavedArray, View
from .devices import Region, slices_in
from .ranges import OutOfRange
from .reader import Allocate, ArrayReader, ReadRequest, foresee

BATCH_BYTES = 16 << 20  # of regions of stored leaves that are read together


class _HeldChunks(threading.local):
    """The whole chunks that each thread read last, one array at a time."""

    def __init__(self) -> None:
        self._key: tuple[str, Region] | None = None
        self._array: np.ndarray[Any, Any] | None = None

    def get(
        self, key: tuple[str, Region], read: Callable[[], np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any]:
        """Returns the array of a key, held or read now in place of the one before."""
        if self._array is None or self._key != key:
            self._array = None
            self._array = read()
            self._key = key
        return self._array


class ViewReader:
    """Fills leaves of a tree that was operated on: see ArrayReader.

    `order` are the paths of its arrays so that those that are made of one stored leaf follow each
    other: read in this order, no chunk is read twice that can be read only whole.
    """

    def __init__(
        self, reader: ArrayReader, views: Mapping[str, View], order: Sequence[str]
    ) -> None:
        self._reader = reader
        self._views = views
        self._held = _HeldChunks()
        self.order = order

    def foresee(self, reads: Iterable[ReadRequest]) -> None:
        """Takes notice of what will be read: see ForeseeingReader."""
        needed = (
            ReadRequest(leaf, around_chunks(leaf, region))
            for read in reads
            for leaf, region in self._views[read.leaf.path].reads(read.region)
        )
        foresee(self._reader, needed)

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader.

        What is stored as it is asked for is read straight to where it goes.
        """
        views = [self._views[read.leaf.path] for read in reads]
        straight: list[tuple[ReadRequest, ReadRequest]] = []
        made: list[tuple[ReadRequest, View]] = []
        for read, view in zip(reads, views, strict=True):
            if isinstance(view, SavedArray):
                straight.append((read, ReadRequest(view.leaf, read.region)))
            else:
                made.append((read, view))
        if straight:
            self._reader.fill([inner for _, inner in straight], allocate)
        for read, inner in straight:
            assert inner.array is not None
            read.take(inner.array)
        needed = [each for read, view in made for each in view.reads(read.region)]
        arrays = self._arrays(needed)
        for read, view in made:
            read.lie_in(allocate(read.nbytes))
            assert read.array is not None
            try:
                view.put(read.region, arrays, read.array)
            except OutOfRange as error:
                raise error.of_leaf(read.leaf.path) from None

    def _arrays(self, needed: Sequence[Read]) -> Iterator[np.ndarray[Any, Any]]:
        """Yields regions of stored leaves, read in batches; each is let go of when it is passed."""
        batch: list[ReadRequest] = []
        held = 0
        for leaf, region in needed:
            around = around_chunks(leaf, region)
            if around != region:
                if batch:
                    yield from self._read(batch)
                    held = 0
                yield self._chunks(leaf, around)[slices_in(region, around)]
                continue
            read = ReadRequest(leaf, region)
            if batch and held + read.nbytes > BATCH_BYTES:
                yield from self._read(batch)
                held = 0
            batch.append(read)
            held += read.nbytes
        if batch:
            yield from self._read(batch)

    def _chunks(self, leaf: LeafRecord, region: Region) -> np.ndarray[Any, Any]:
        return self._held.get((leaf.path, region), lambda: self._one(leaf, region))

    def _one(self, leaf: LeafRecord, region: Region) -> np.ndarray[Any, Any]:
        (array,) = self._read([ReadRequest(leaf, region)])
        return array

    def _read(self, batch: list[ReadRequest]) -> Iterator[np.ndarray[Any, Any]]:
        self._reader.fill(batch, lambda nbytes: np.empty(nbytes, np.uint8))
        while batch:
            array = batch.pop(0).array
            assert array is not None
            yield array


def around_chunks(leaf: LeafRecord, region: Region) -> Region:
    """Returns the whole chunks around a region where it costs as much to read them, else itself.

    Of our own chunks rows are read, of others' none less than a chunk.
    """
    grid = leaf.grid
    assert grid is not None
    is_own = leaf.files is not None
    around = tuple(
        (start, stop)
        if is_own and axis == 0
        else (start // chunk * chunk, min(-(-stop // chunk) * chunk, size))
        for axis, ((start, stop), chunk, size) in enumerate(
            zip(region, (max(chunk, 1) for chunk in grid.chunk_shape), leaf.shape, strict=True)
        )
    )
    if any(start >= stop for start, stop in region):
        return region
    return around if _count(around) >= 2 * _count(region) else region


def _count(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)

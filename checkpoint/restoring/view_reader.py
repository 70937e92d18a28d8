"""The reader of leaves that are made of stored ones, as views say.

A region of a leaf is made of the regions of stored ones that it needs, so that memory is bounded by
what is asked for at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..format.record import LeafRecord
from .array_views import Read, SavedArray, View
from .devices import Region, slices_in
from .ranges import OutOfRange
from .reader import Allocate, ArrayReader, ReadRequest, foresee

BATCH_BYTES = 16 << 20  # of regions of stored leaves that are read together


class _HeldChunk(threading.local):
    """The whole chunks of a leaf that each thread read last as one array."""

    key: tuple[str, Region] | None = None
    array: np.ndarray[Any, Any] | None = None

    def keep(
        self, key: tuple[str, Region] | None, array: np.ndarray[Any, Any] | None = None
    ) -> None:
        """Keeps an array instead of the one before."""
        self.key = key
        self.array = array


class ViewReader:
    """Fills leaves that `views` make of stored ones, by their paths; the others are read as they
    are. See ArrayReader.

    `order` are the paths so that leaves that are made of one stored leaf follow each other: read in
    this order, no chunk is read twice that can be read only whole.
    """

    def __init__(
        self, reader: ArrayReader, views: Mapping[str, View], order: Sequence[str] = ()
    ) -> None:
        self._reader = reader
        self._views = views
        self._held = _HeldChunk()
        self.order = order

    def _view_of(self, leaf: LeafRecord) -> View:
        return self._views.get(leaf.path) or SavedArray.of(leaf)

    def foresee(self, reads: Iterable[ReadRequest]) -> None:
        """Takes notice of what will be read: see ForeseeingReader."""
        foresee(self._reader, (each for read in reads for each in self._needed(read)))

    def _needed(self, read: ReadRequest) -> Iterator[ReadRequest]:
        view = self._view_of(read.leaf)
        for leaf, region in view.reads(read.region):
            is_straight = isinstance(view, SavedArray)
            yield ReadRequest(leaf, region if is_straight else around_chunks(leaf, region))

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader.

        What is stored as it is asked for is read straight to where it goes.
        """
        straight: list[tuple[ReadRequest, ReadRequest]] = []
        made: list[tuple[ReadRequest, View]] = []
        for read in reads:
            view = self._view_of(read.leaf)
            if isinstance(view, SavedArray):
                straight += [(read, ReadRequest(*each)) for each in view.reads(read.region)]
            else:
                made.append((read, view))
        if straight:
            self._reader.fill([inner for _, inner in straight], allocate)
        for read, inner in straight:
            assert inner.array is not None
            read.take(inner.array.reshape(read.shape))
        arrays = self._arrays(each for read, view in made for each in view.reads(read.region))
        for read, view in made:
            read.lie_in(allocate(read.nbytes))
            assert read.array is not None
            try:
                view.put(read.region, arrays, read.array)
            except OutOfRange as error:
                raise error.of_leaf(read.leaf.path) from None

    def _arrays(self, needed: Iterable[Read]) -> Iterator[np.ndarray[Any, Any]]:
        """Yields regions of stored leaves, read in batches; each is let go of when it is passed."""
        batch: list[ReadRequest] = []
        held = 0
        for leaf, region in needed:
            read = ReadRequest(leaf, region)
            around = around_chunks(leaf, region)
            if around != region or held + read.nbytes > BATCH_BYTES:
                yield from self._read(batch)
                held = 0
            if around != region:
                yield self._chunks(leaf, around)[slices_in(region, around)]
            else:
                batch.append(read)
                held += read.nbytes
        yield from self._read(batch)

    def _chunks(self, leaf: LeafRecord, region: Region) -> np.ndarray[Any, Any]:
        """Returns whole chunks, held or read now in place of those before."""
        held = self._held
        if held.key != (leaf.path, region):
            held.keep(None)
            (array,) = self._read([ReadRequest(leaf, region)])
            held.keep((leaf.path, region), array)
        assert held.array is not None
        return held.array

    def _read(self, batch: list[ReadRequest]) -> Iterator[np.ndarray[Any, Any]]:
        """Reads a batch, and empties it."""
        if batch:
            self._reader.fill(batch, lambda nbytes: np.empty(nbytes, np.uint8))
        while batch:
            array = batch.pop(0).array
            assert array is not None
            yield array


def read_by_other_paths(
    reader: ArrayReader, leaves: Iterable[LeafRecord], stored: Iterable[LeafRecord]
) -> ViewReader:
    """Returns the reader of stored leaves that go by other paths."""
    pairs = zip(leaves, stored, strict=True)
    return ViewReader(
        reader, {leaf.path: SavedArray.of(old) for leaf, old in pairs if old.grid is not None}
    )


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

"""The reader of leaves that are made of stored ones, as views say.

A region of a leaf is made of the regions of stored ones that it needs, one after the other, so that
memory is bounded: small ones are read several at once, and what can be read only whole is read once
for all that lies in it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..arrays.dtypes import HostArray
from ..arrays.ranges import OutOfRange
from ..format.record import LeafRecord
from .array_views import SavedArray, View
from .devices import Region, shape_of, slices_in
from .reader import Allocate, ArrayReader, ReadRequest, foresee

BATCH_BYTES = 16 << 20  # that are read together


class Wanted(NamedTuple):
    """A region of a leaf, and the region `around` it that is read for it: itself, or whole chunks,
    which the next regions may lie in too.
    """

    leaf: LeafRecord
    region: Region
    around: Region


class HeldChunks:
    """The whole chunks of a leaf that were read last, as one array."""

    _arrays: Mapping[tuple[str, Region], HostArray] = MappingProxyType({})

    def get(self, reader: ArrayReader, leaf: LeafRecord, region: Region) -> HostArray:
        """Returns whole chunks, held or read now in place of those before."""
        key = (leaf.path, region)
        if key not in self._arrays:
            self._arrays = {}
            (array,) = _filled(reader, [ReadRequest(leaf, region)], fresh)
            self._arrays = {key: array}
        return self._arrays[key]


def fresh(nbytes: int) -> HostArray:
    """Returns memory that goes back to the system with its array: for what is only passed on."""
    return np.empty(nbytes, np.uint8)


def read_in_order(
    reader: ArrayReader,
    wanted: Iterable[Wanted],
    *,
    held: HeldChunks | None = None,
    batch_bytes: int = BATCH_BYTES,
    allocate: Allocate = fresh,
) -> Iterator[HostArray]:
    """Yields the arrays of regions, read in batches of at most so many bytes, or of one region.

    Each is let go of when it is passed. `held` keeps whole chunks from one call to the next.
    """
    held = held or HeldChunks()
    batch: list[ReadRequest] = []
    nbytes = 0
    for leaf, region, around in wanted:
        read = ReadRequest(leaf, region)
        is_cut = around != region
        if is_cut or nbytes + read.nbytes > batch_bytes:
            yield from _filled(reader, batch, allocate)
            nbytes = 0
        if is_cut:
            yield held.get(reader, leaf, around)[slices_in(region, around)]
        else:
            batch.append(read)
            nbytes += read.nbytes
    yield from _filled(reader, batch, allocate)


def _filled(
    reader: ArrayReader, batch: list[ReadRequest], allocate: Allocate
) -> Iterator[HostArray]:
    """Reads a batch, and empties it."""
    if batch:
        reader.fill(batch, allocate)
    while batch:
        array = batch.pop(0).array
        assert array is not None
        yield array


class _HeldByThread(threading.local, HeldChunks):
    """The whole chunks that each thread read last."""


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
        self._held = _HeldByThread()
        self.order = order

    def _view_of(self, leaf: LeafRecord) -> View:
        return self._views.get(leaf.path) or SavedArray.of(leaf)

    def foresee(self, reads: Iterable[ReadRequest]) -> None:
        """Takes notice of what will be read: see ForeseeingReader."""
        wanted = (each for read in reads for each in _wanted(self._view_of(read.leaf), read.region))
        foresee(self._reader, (ReadRequest(leaf, around) for leaf, _, around in wanted))

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
        wanted = (each for read, view in made for each in _wanted(view, read.region))
        arrays = read_in_order(self._reader, wanted, held=self._held)
        for read, view in made:
            read.lie_in(allocate(read.nbytes))
            assert read.array is not None
            try:
                view.put(read.region, arrays, read.array)
            except OutOfRange as error:
                raise error.of_leaf(read.leaf.path) from None


def _wanted(view: View, region: Region) -> Iterator[Wanted]:
    """Yields what is read for a region of a view."""
    for leaf, needed in view.reads(region):
        is_straight = isinstance(view, SavedArray)
        yield Wanted(leaf, needed, needed if is_straight else around_chunks(leaf, needed))


def read_by_other_paths(
    reader: ArrayReader, leaves: Iterable[LeafRecord], stored: Iterable[LeafRecord]
) -> ViewReader:
    """Returns the reader of stored leaves that go by other paths."""
    views = {
        leaf.path: SavedArray.of(old)
        for leaf, old in zip(leaves, stored, strict=True)
        if old.grid is not None
    }
    return ViewReader(reader, views)


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
    wanted = math.prod(shape_of(region))
    return around if wanted and math.prod(shape_of(around)) >= 2 * wanted else region

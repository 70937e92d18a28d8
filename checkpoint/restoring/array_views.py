"""Arrays that are made of stored ones, region by region.

A view knows its shape and dtype, which regions of stored leaves a region of it needs, and how that
region is made of them. Nothing here reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..arrays.dtypes import Dtype, HostArray
from ..arrays.ranges import converted
from ..format.grid import Shape
from ..format.record import LeafRecord
from .devices import Region, overlap, shape_of, slices_in

STRIPE_BYTES = 8 << 20  # of a leaf that is transposed, at a time
Read: TypeAlias = tuple[LeafRecord, Region]
# The arrays of a view's reads, in their order.
Arrays: TypeAlias = Iterator[HostArray]


@dataclass(frozen=True, eq=False)
class View:
    """An array of `shape` and `dtype`.

    `chunk` is the shape of the least that is worth making at once: a smaller region costs as much.
    """

    shape: Shape
    dtype: Dtype
    chunk: Shape

    def reads(self, region: Region) -> Iterator[Read]:
        """Yields the regions of leaves that a region needs."""
        raise NotImplementedError

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        """Returns a region, of the arrays of its reads; it may share their memory."""
        out = np.empty(shape_of(region), self.dtype)
        self.put(region, arrays, out)
        return out

    def put(self, region: Region, arrays: Arrays, out: HostArray) -> None:
        """Writes a region into `out`, which has its shape."""
        out[...] = self.make(region, arrays)


@dataclass(frozen=True, eq=False)
class SavedArray(View):
    """A leaf as it is stored, or of its first axis one row."""

    leaf: LeafRecord
    row: Region = ()

    @classmethod
    def of(cls, leaf: LeafRecord, row: Region = ()) -> SavedArray:
        assert leaf.grid is not None
        rank = len(row)
        return cls(leaf.shape[rank:], leaf.numpy_dtype, leaf.grid.chunk_shape[rank:], leaf, row)

    def reads(self, region: Region) -> Iterator[Read]:
        yield self.leaf, (*self.row, *region)

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        array = next(arrays)
        return array[0] if self.row else array


@dataclass(frozen=True, eq=False)
class ViewOfOne(View):
    """A view of another one: its region `inner`, unless a subclass changes it."""

    of_view: View

    def inner(self, region: Region) -> Region:
        """Returns the region of the other view that a region needs."""
        return region

    def reads(self, region: Region) -> Iterator[Read]:
        return self.of_view.reads(self.inner(region))

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        return self.of_view.make(self.inner(region), arrays)


@dataclass(frozen=True, eq=False)
class Given(View):
    """An array that is there."""

    value: HostArray

    @classmethod
    def of(cls, value: Any) -> Given:
        array = np.asarray(value)
        return cls(array.shape, array.dtype, (1,) * array.ndim, array)

    def reads(self, region: Region) -> Iterator[Read]:
        return iter(())

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        array: HostArray = self.value[tuple(slice(*bounds) for bounds in region)]
        return array


@dataclass(frozen=True, eq=False)
class Transposed(View):
    """A view with its axes permuted."""

    of_view: View
    axes: tuple[int, ...]

    @classmethod
    def of(cls, view: View, axes: Sequence[int] | None) -> Transposed:
        rank = len(view.shape)
        given = range(rank)[::-1] if axes is None else axes
        order = tuple(axis + rank if axis < 0 else axis for axis in given)
        if sorted(order) != list(range(rank)):
            raise ValueError(f"the axes {list(given)} are no order of its {rank} axes")
        shape = tuple(view.shape[axis] for axis in order)
        # A stripe across a moved axis is spread over the whole array that is stored.
        moved = next((axis for axis, old in enumerate(order) if axis != old), rank)
        chunk = (*view.chunk[:moved], *shape[moved:])
        return cls(shape, view.dtype, chunk, view, order)

    def _inner(self, region: Region) -> Region:
        inner = dict(zip(self.axes, region, strict=True))
        return tuple(inner[axis] for axis in range(len(region)))

    def _stripes(self, region: Region) -> Iterator[tuple[Region, Region]]:
        """Yields stripes of a region of the other view, and each as a region of this one.

        They lie along its first axis, so that a large leaf is not held twice.
        """
        inner = self._inner(region)
        if not inner:
            yield inner, region
            return
        start, stop = inner[0]
        row = math.prod(shape_of(inner[1:])) * self.dtype.itemsize
        chunk = max(self.of_view.chunk[0], 1)
        rows = max(STRIPE_BYTES // max(row, 1) // chunk, 1) * chunk
        axis = self.axes.index(0)
        while start < stop:
            end = min((start // chunk * chunk) + rows, stop)
            yield ((start, end), *inner[1:]), _with(region, axis, (start, end))
            start = end

    def reads(self, region: Region) -> Iterator[Read]:
        for inner, _ in self._stripes(region):
            yield from self.of_view.reads(inner)

    def put(self, region: Region, arrays: Arrays, out: HostArray) -> None:
        for inner, own in self._stripes(region):
            out[slices_in(own, region)] = self.of_view.make(inner, arrays).transpose(self.axes)


@dataclass(frozen=True, eq=False)
class Casted(ViewOfOne):
    """A view in another dtype."""

    @classmethod
    def of(cls, view: View, dtype: Dtype) -> Casted:
        if view.dtype.kind == "c" and dtype.kind != "c":
            raise ValueError(f"{dtype.name} cannot hold the imaginary parts of {view.dtype.name}")
        return cls(view.shape, dtype, view.chunk, view)

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        return converted(super().make(region, arrays), self.dtype)


@dataclass(frozen=True, eq=False)
class Reshaped(ViewOfOne):
    """A view in another shape."""

    @classmethod
    def of(cls, view: View, shape: Sequence[int]) -> Reshaped:
        size = math.prod(view.shape)
        given = tuple(shape)
        known = math.prod(each for each in given if each >= 0)
        if given.count(-1) > 1 or min(given, default=0) < -1:
            raise ValueError(f"{list(given)} is no shape: expected sizes, of which one may be -1")
        if -1 in given and known:
            given = tuple(size // known if each < 0 else each for each in given)
        if -1 in given or math.prod(given) != size:
            raise ValueError(f"an array of {list(view.shape)} has no shape {list(shape)}")
        return cls(given, view.dtype, _reshaped_chunk(view, given), view)

    def _rows(self, region: Region) -> tuple[tuple[int, int], Region]:
        """Returns the flat range that holds a region, and the rows of the other shape around it.

        The range counts from the first of these rows on.
        """
        shape = self.of_view.shape
        if any(start >= stop for start, stop in region):
            return (0, 0), tuple((0, 0) for _ in shape)
        first = _flat([start for start, _ in region], self.shape)
        last = _flat([stop - 1 for _, stop in region], self.shape)
        if not shape:
            return (0, 1), ()
        row = math.prod(shape[1:])
        rows = (first // row, last // row + 1)
        start = rows[0] * row
        return (first - start, last + 1 - start), (rows, *((0, size) for size in shape[1:]))

    def inner(self, region: Region) -> Region:
        return self._rows(region)[1]

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        (start, stop), _ = self._rows(region)
        flat = np.ascontiguousarray(super().make(region, arrays)).reshape(-1)[start:stop]
        sizes = shape_of(region)
        if 0 in sizes:
            return np.empty(sizes, self.dtype)
        strides = [self.dtype.itemsize] * len(sizes)
        for axis in range(len(sizes) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * self.shape[axis + 1]
        # By its bytes: numpy's protocols of buffers do not know every dtype of jax's.
        return np.ndarray(sizes, self.dtype, flat.view(np.uint8), strides=strides)


def _reshaped_chunk(view: View, shape: Shape) -> Shape:
    """Returns as many rows of a new shape as have the entries of a view's chunks along its rows."""
    if not shape or not view.shape or 0 in shape:
        return shape
    entries = view.chunk[0] * math.prod(view.shape[1:])
    row = math.prod(shape[1:])
    return (min(shape[0], -(-entries // row)), *shape[1:])


def _flat(position: Sequence[int], shape: Shape) -> int:
    """Returns the place of an entry in C order."""
    at = 0
    for index, size in zip(position, shape, strict=True):
        at = at * size + index
    return at


@dataclass(frozen=True, eq=False)
class Repeated(ViewOfOne):
    """A view with each entry along an axis several times."""

    count: int
    axis: int

    @classmethod
    def of(cls, view: View, count: int, axis: int) -> Repeated:
        axis = axis_of(view.shape, axis)
        if count < 1:
            raise ValueError(f"it cannot be repeated {count} times")
        shape = _with(view.shape, axis, view.shape[axis] * count)
        chunk = _with(view.chunk, axis, view.chunk[axis] * count)
        return cls(shape, view.dtype, chunk, view, count=count, axis=axis)

    def inner(self, region: Region) -> Region:
        start, stop = region[self.axis]
        return _with(region, self.axis, (start // self.count, -(-stop // self.count)))

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        array = np.repeat(super().make(region, arrays), self.count, self.axis)
        start, stop = region[self.axis]
        first = start // self.count * self.count
        return array[(*[slice(None)] * self.axis, slice(start - first, stop - first))]


@dataclass(frozen=True, eq=False)
class Expanded(ViewOfOne):
    """A view with one more axis, of one entry."""

    axis: int

    @classmethod
    def of(cls, view: View, axis: int) -> Expanded:
        rank = len(view.shape) + 1
        if not -rank <= axis < rank:
            raise ValueError(f"an array of {list(view.shape)} has no place for an axis {axis}")
        axis %= rank
        shape = (*view.shape[:axis], 1, *view.shape[axis:])
        chunk = (*view.chunk[:axis], 1, *view.chunk[axis:])
        return cls(shape, view.dtype, chunk, view, axis)

    def inner(self, region: Region) -> Region:
        return _with(region, self.axis)

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        return np.expand_dims(super().make(region, arrays), self.axis)

    def put(self, region: Region, arrays: Arrays, out: HostArray) -> None:
        self.of_view.put(self.inner(region), arrays, out.squeeze(self.axis))


@dataclass(frozen=True, eq=False)
class Joined(View):
    """Several views, one after the other along an axis."""

    views: tuple[View, ...]
    axis: int

    @classmethod
    def of(cls, views: Sequence[View], axis: int) -> Joined:
        first = views[0]
        axis = axis_of(first.shape, axis)
        for view in views[1:]:
            if _with(view.shape, axis, 0) != _with(first.shape, axis, 0):
                raise ValueError(f"{list(view.shape)} does not go with {list(first.shape)}")
            if view.dtype != first.dtype:
                raise ValueError(f"{view.dtype} does not go with {first.dtype}: cast one of them")
        shape = _with(first.shape, axis, sum(view.shape[axis] for view in views))
        chunk = tuple(map(max, zip(*(view.chunk for view in views), strict=True)))
        return cls(shape, first.dtype, chunk, tuple(views), axis)

    def _inner(self, region: Region) -> Iterator[tuple[View, Region, Region]]:
        """Yields each view that a region touches, with that in its region and in the joined."""
        first = 0
        for view in self.views:
            stop = first + view.shape[self.axis]
            whole = _with(tuple((0, size) for size in self.shape), self.axis, (first, stop))
            common = overlap(region, whole)
            if all(start < stop for start, stop in common):
                start, stop_here = common[self.axis]
                yield view, _with(common, self.axis, (start - first, stop_here - first)), common
            first = stop

    def reads(self, region: Region) -> Iterator[Read]:
        for view, inner, _ in self._inner(region):
            yield from view.reads(inner)

    def put(self, region: Region, arrays: Arrays, out: HostArray) -> None:
        for view, inner, common in self._inner(region):
            view.put(inner, arrays, out[slices_in(common, region)])


@dataclass(frozen=True, eq=False)
class Sliced(ViewOfOne):
    """A view from `first` on along an axis."""

    axis: int
    first: int

    @classmethod
    def of(cls, view: View, axis: int, first: int, size: int) -> Sliced:
        axis = axis_of(view.shape, axis)
        shape = _with(view.shape, axis, size)
        chunk = tuple(map(min, zip(view.chunk, shape, strict=True)))
        return cls(shape, view.dtype, chunk, view, axis=axis, first=first)

    def inner(self, region: Region) -> Region:
        start, stop = region[self.axis]
        return _with(region, self.axis, (start + self.first, stop + self.first))

    def put(self, region: Region, arrays: Arrays, out: HostArray) -> None:
        self.of_view.put(self.inner(region), arrays, out)


@dataclass(frozen=True, eq=False)
class Squeezed(ViewOfOne):
    """A view without an axis that has one entry."""

    axis: int

    @classmethod
    def of(cls, view: View, axis: int) -> Squeezed:
        axis = axis_of(view.shape, axis)
        assert view.shape[axis] == 1
        return cls(_with(view.shape, axis), view.dtype, _with(view.chunk, axis), view, axis)

    def inner(self, region: Region) -> Region:
        return (*region[: self.axis], (0, 1), *region[self.axis :])

    def make(self, region: Region, arrays: Arrays) -> HostArray:
        return super().make(region, arrays).squeeze(self.axis)


def axis_of(shape: Shape, axis: int) -> int:
    """Returns an axis as a number from 0 on; raises ValueError where there is none."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"an array of {list(shape)} has no axis {axis}")
    return axis % len(shape)


def _with(sizes: tuple[Any, ...], axis: int, *values: Any) -> tuple[Any, ...]:
    """Returns sizes, or a region, with another value for one axis, or without that axis."""
    return (*sizes[:axis], *values, *sizes[axis + 1 :])

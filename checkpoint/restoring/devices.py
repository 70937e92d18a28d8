"""Puts arrays of the host on this process's devices, in one call a leaf.

Nothing is copied where the host's memory is the device's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from ..arrays.dtypes import Dtype, HostArray
from ..format.grid import Shape

Region = tuple[tuple[int, int], ...]


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """Returns an index of slices as (start, stop) an axis."""
    return tuple(
        (cut.start or 0, size if cut.stop is None else cut.stop)
        for cut, size in zip(index, shape, strict=True)
    )


def shape_of(region: Region) -> Shape:
    """Returns how much of each axis a region has."""
    return tuple(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region:
    """Returns what two regions of one array have in common; an axis may have nothing."""
    pairs = zip(one, other, strict=True)
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)


def slices_in(region: Region, whole: Region) -> tuple[slice, ...]:
    """Returns the index of a region in an array of a whole that holds it."""
    pairs = zip(region, whole, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)


class DevicePlacement:
    """The regions of arrays of one shape, dtype and sharding that this process's devices need.

    Made once for all these arrays. Raises ValueError where the sharding cannot divide the shape.
    """

    def __init__(self, sharding: Sharding, shape: Shape, dtype: Dtype) -> None:
        sharding.shard_shape(shape)
        self._sharding = sharding
        self._shape = shape
        indices = sharding.addressable_devices_indices_map(shape)
        self._device_regions = [region_of(index or (), shape) for index in indices.values()]
        self.regions = list(dict.fromkeys(self._device_regions))
        self.num_elements = sum(math.prod(shape_of(region)) for region in self.regions)
        self._make = _batched_put(sharding, shape, dtype, list(indices))

    def put(self, arrays: dict[Region, HostArray]) -> jax.Array:
        """Returns the array that has these regions; the memory belongs to the array from now on."""
        if self._make is not None:
            return self._make([arrays[region] for region in self._device_regions])
        shape = self._shape
        return jax.make_array_from_callback(
            shape, self._sharding, lambda index: arrays[region_of(index or (), shape)]
        )


def _batched_put(
    sharding: Sharding, shape: Shape, dtype: Dtype, devices: list[Any]
) -> Callable[[list[Any]], jax.Array] | None:
    """Returns the call that `make_array_from_callback` ends in, without its checks of each array.

    Returns None where this jax has no such call.
    """
    try:
        from jax._src import core
        from jax._src.interpreters import pxla

        aval = core.update_aval_with_sharding(core.ShapedArray(shape, dtype), sharding)
        put: Any = pxla.batched_device_put
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda arrays: put(aval, sharding, arrays, devices)

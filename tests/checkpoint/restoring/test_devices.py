"""Placements: the regions that this process's devices need, and the arrays made of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from holdfast.checkpoint.restoring.devices import DevicePlacement, _batched_put, region_of


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 9), st.integers(0, 9)),
        max_size=4,
    )
)
def test_a_region_is_what_an_index_selects(axes: list[tuple[int, bool, int, int]]) -> None:
    """(start, stop) of each axis select what the slices do, with None for an end."""
    shape = tuple(size for size, *_ in axes)
    index = [
        slice(None) if whole else slice(min(a, b, size), min(max(a, b), size))
        for size, whole, a, b in axes
    ]
    array = np.arange(math.prod(shape)).reshape(shape)
    again = tuple(slice(start, stop) for start, stop in region_of(index, shape))
    assert np.array_equal(array[again], array[tuple(index)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_an_array_is_made_of_its_regions(dtype: str) -> None:
    """What is put comes back with its sharding, values and dtype, on a mesh and on one device;
    every region is asked for once.
    """
    device = jax.devices()[0]
    mesh = Mesh(np.array([device]).reshape(1, 1), ("x", "y"))
    array = np.arange(24).reshape(4, 6).astype(jnp.dtype(dtype))
    for sharding in (NamedSharding(mesh, PartitionSpec("x", "y")), SingleDeviceSharding(device)):
        placement = DevicePlacement(sharding, array.shape, array.dtype)
        assert placement.regions == [((0, 4), (0, 6))]
        found = placement.put({placement.regions[0]: array.copy()})
        assert (
            found.sharding == sharding
            and found.dtype == array.dtype
            and np.asarray(found).tobytes() == array.tobytes()
        )


def test_the_call_that_skips_checks_is_there() -> None:
    """The jax that is installed has the inner call; without it `make_array_from_callback` would do,
    more slowly.
    """
    device = jax.devices()[0]
    assert (
        _batched_put(SingleDeviceSharding(device), (2,), np.dtype(np.float32), [device]) is not None
    )

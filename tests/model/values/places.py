"""Where arrays of jax lie: devices, meshes, shardings, memory kinds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

COUNT = 8  # devices of the process


def meshes() -> list[Mesh]:
    """Returns meshes of all devices, and of some of them."""
    devices = np.array(jax.devices()[:COUNT])
    return [
        Mesh(devices, ("x",)),
        Mesh(devices.reshape(4, 2), ("x", "y")),
        Mesh(devices[2:6], ("x",)),
        Mesh(devices[:1], ("x",)),
    ]


def shardings_for(shape: tuple[int, ...]) -> st.SearchStrategy[Sharding]:
    """Draws shardings that can divide a shape."""
    found: list[Sharding] = [SingleDeviceSharding(device) for device in jax.devices()[:COUNT:3]]
    for mesh in meshes():
        axes: list[Any] = [None, *mesh.axis_names, tuple(mesh.axis_names)]
        specs = [PartitionSpec()]
        specs += [
            PartitionSpec(*(None,) * axis, name) for axis in range(len(shape)) for name in axes
        ]
        for spec in specs:
            sharding = NamedSharding(mesh, spec)
            try:
                sharding.shard_shape(shape)
            except ValueError:
                continue
            found += [sharding, sharding.with_memory_kind("pinned_host")]
    return st.sampled_from(found)


@st.composite
def placements(draw: st.DrawFn, array: np.ndarray[Any, Any]) -> jax.Array:
    """Draws an array of jax that is equal to one of numpy."""
    if draw(st.integers(0, 2)) == 0:
        return jax.device_put(array)
    return jax.device_put(array, draw(shardings_for(array.shape)))

"""Where arrays of jax lie: devices, meshes, shardings, memory kinds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

COUNT = 8  # devices of the process


def meshes() -> list[Mesh]:
    """Returns meshes of all devices, and of some of them."""
    devices = np.array(jax.devices()[:COUNT])
    explicit = AxisType.Explicit
    return [
        Mesh(devices, ("x",)),
        Mesh(devices.reshape(4, 2), ("x", "y"), axis_types=(explicit, explicit)),
        Mesh(devices.reshape(2, 4), ("y", "x"), axis_types=(explicit, AxisType.Auto)),
        Mesh(devices[4:6], ("x",), axis_types=(explicit,)),
        Mesh(devices.reshape(4, 2), ("x", "y")),
        Mesh(devices[2:6], ("x",)),
        Mesh(devices[:1], ("x",)),
    ]


def spec_axes(spec: Any) -> set[str]:
    """Returns the mesh axes that divide an array."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return {axis for entry in entries for axis in entry if axis is not None}


def is_same_place(one: Sharding, other: Sharding, rank: int) -> bool:
    """Says whether two shardings are one for an array: P("x") and P("x", None) are."""
    if not isinstance(one, NamedSharding) or not isinstance(other, NamedSharding):
        return bool(one == other)
    return (
        one.mesh == other.mesh
        and one.memory_kind == other.memory_kind
        and one.spec.reduced == other.spec.reduced
        and one.is_equivalent_to(other, rank)
    )


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
            if mesh.are_all_axes_explicit and "x" not in spec_axes(spec):
                found.append(NamedSharding(mesh, spec.update(reduced=frozenset({"x"}))))
    return st.sampled_from(found)


@st.composite
def placements(draw: st.DrawFn, array: np.ndarray[Any, Any]) -> jax.Array:
    """Draws an array of jax that is equal to one of numpy."""
    if draw(st.integers(0, 2)) == 0:
        return jax.device_put(array)
    return jax.device_put(array, draw(shardings_for(array.shape)))

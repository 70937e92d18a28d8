"""Reading each byte once in the whole job: replicated leaves are read in parts and spread over the interconnect.

The only device collective of this room, on request (`read_once=True`): a leaf that its sharding replicates over mesh axes is read with
those axes dividing it too, and one jitted identity for all leaves of a mesh gathers them to where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ._devices import Placement
from ._match import Want
from ._planner import axes_of


def narrow(wants: Sequence[Want]) -> list[Want]:
    """Returns the wants with shardings that divide what they replicate, as far as the shapes allow; alike on every process."""
    return [want._replace(sharding=_narrow(want.sharding, want.leaf.shape)) if want.leaf.kind == "array" else want for want in wants]


def _narrow(sharding: Sharding | None, shape: Sequence[int]) -> Sharding | None:
    if not isinstance(sharding, NamedSharding) or 0 in shape:
        return sharding
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.devices.shape, strict=True))
    spec = [list(axes_of(entry)) for entry in sharding.spec] + [[] for _ in range(len(shape) - len(sharding.spec))]
    left, changed = list(shape), False
    for axis, axes in enumerate(spec):
        for name in axes:
            left[axis] //= sizes[name]
    for name in sorted(set(sizes) - {name for axes in spec for name in axes}):
        place = next((axis for axis, size in enumerate(left) if size % sizes[name] == 0), None)
        if place is not None and sizes[name] > 1:
            spec[place].append(name)
            left[place] //= sizes[name]
            changed = True
    if not changed:
        return sharding
    made: Any = PartitionSpec(*(tuple(axes) or None for axes in spec))  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, made)


def spread(values: Sequence[Any], narrowed: Sequence[Want], wants: Sequence[Want]) -> list[Any]:
    """Returns the values as they were wanted; every process of the mesh calls it with the same wants."""
    result = list(values)
    groups: dict[tuple[Any, ...], list[int]] = {}  # one computation runs on one list of devices
    for index, (now, then) in enumerate(zip(narrowed, wants, strict=True)):
        if now.sharding != then.sharding:
            assert isinstance(then.sharding, NamedSharding)
            groups.setdefault(tuple(then.sharding.mesh.devices.flat), []).append(index)
    for moved in groups.values():
        arrays = _gather([values[index] for index in moved], [wants[index] for index in moved])
        for index, array in zip(moved, arrays, strict=True):
            result[index] = array
    return result


def _gather(arrays: Sequence[jax.Array], wants: Sequence[Want]) -> Sequence[jax.Array]:
    if not any(array.addressable_shards for array in arrays):  # nothing of it is on this process
        placements = [
            Placement(want.sharding, array.shape, array.dtype) for want, array in zip(wants, arrays, strict=True) if want.sharding
        ]
        return [placement.put({}) for placement in placements]
    shardings = [want.sharding for want in wants]
    gathered: list[jax.Array] = jax.jit(lambda arrays: list(map(_resharded, arrays, shardings)), out_shardings=shardings)(list(arrays))
    for array in gathered:
        array.block_until_ready()  # collectives of meshes that share devices run one after the other
    return gathered


def _resharded(array: Any, sharding: Any) -> Any:
    """Moves an array's bits: collectives of small floats go through larger ones, which makes other NaNs of signalling ones (seen).

    The barriers keep the compiler from seeing through the disguise.
    """
    lax: Any = jax.lax
    info: Any = ml_dtypes.finfo
    if not jnp.issubdtype(array.dtype, jnp.floating) or (bits := info(array.dtype).bits) not in (4, 8, 16, 32, 64):
        return lax.with_sharding_constraint(array, sharding)
    raw = lax.optimization_barrier(lax.bitcast_convert_type(array, f"uint{bits}"))
    moved = lax.optimization_barrier(lax.with_sharding_constraint(raw, sharding))
    return lax.bitcast_convert_type(moved, array.dtype)


__all__ = ["narrow", "spread"]

"""Reading each byte once in the whole job: replicated leaves are read in parts and spread over the interconnect.

The only device collective of this room, on request (`read_once=True`): a leaf that its sharding replicates over mesh axes is read with
those axes dividing it too, and one jitted identity for all leaves gathers them to where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ._match import Want
from ._planner import axes_of


def narrow(wants: Sequence[Want]) -> list[Want]:
    """Returns the wants with shardings that divide what they replicate, as far as the shapes allow; alike on every process."""
    return [want._replace(sharding=_narrow(want.sharding, want.leaf.shape)) if want.leaf.kind == "array" else want for want in wants]


def _narrow(sharding: Sharding | None, shape: Sequence[int]) -> Sharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.devices.shape, strict=True))
    spec = [list(axes_of(entry)) for entry in sharding.spec] + [[] for _ in range(len(shape) - len(sharding.spec))]
    left, changed = list(shape), False
    for axis, axes in enumerate(spec):
        for name in axes:
            left[axis] //= sizes[name]
    for name in sorted(set(sizes) - {name for axes in spec for name in axes}):
        place = next((axis for axis, size in enumerate(left) if size and size % sizes[name] == 0), None)
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
    moved = [index for index, (now, then) in enumerate(zip(narrowed, wants, strict=True)) if now.sharding != then.sharding]
    if moved:
        gather = jax.jit(lambda arrays: arrays, out_shardings=[wants[index].sharding for index in moved])
        for index, array in zip(moved, gather([values[index] for index in moved]), strict=True):
            result[index] = array
    return result


__all__ = ["narrow", "spread"]

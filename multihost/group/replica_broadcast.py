"""One replica's arrays to all others, over the devices, in rounds that fit into their memory."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding

from .barriers import deadline_of
from .collectives import bounded
from .matching import check_match
from .slices import process_replica_id

# A round holds three copies: what one replica has, what all have made of it, and the sum.
_COPIES = 3
PartitionSpec: Any = jax.sharding.PartitionSpec  # jax does not type it
Leaf = Any  # a jax.Array, or a jax.ShapeDtypeStruct with a sharding


def get_device_memory() -> int:
    """Returns the bytes of memory of this process's first device; on CPU, of the host.

    Raises ValueError where a device does not say.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(f"{device} does not say how much memory it has: give memory_limit_bytes")
    return int(limit)


def get_leaf_memory_per_device(arr: Leaf) -> int:
    """Returns the bytes of an array, or of an abstract one with a sharding, on each device."""
    return int(math.prod(arr.sharding.shard_shape(arr.shape)) * arr.dtype.itemsize)


def tree_memory_per_device(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree on each device."""
    return sum(map(get_leaf_memory_per_device, jax.tree.leaves(tree)))


def get_available_memory(in_tree: Any, scaling_factor: float) -> int:
    """Returns how many bytes a device may take in one round of a broadcast.

    It is `scaling_factor` (at most 1) of what the tree leaves free.
    """
    if not 0 < scaling_factor <= 1:
        raise ValueError(f"scaling_factor={scaling_factor}: expected more than 0 and at most 1")
    return int((get_device_memory() - tree_memory_per_device(in_tree)) * scaling_factor / _COPIES)


def broadcast_one_replica_to_all(  # noqa: PLR0917 as trainers know it from Orbax
    in_tree: tuple[Leaf, ...],
    global_mesh: jax.sharding.Mesh,
    replica_axis_index: int,
    is_source: bool,
    memory_limit_bytes: int | None = None,
    memory_scaling_factor: float = 0.75,
    *,
    timeout_s: float | None = None,
) -> tuple[tuple[jax.Array, ...], int]:
    """Returns the arrays of the one replica on the devices of all, and in how many rounds.

    Every process of the mesh calls it. Each leaf has a NamedSharding over the axes of a replica.
    Where `is_source`, leaves are arrays, which are deleted to make room; elsewhere their shapes,
    dtypes and shardings count. Bits are kept exactly. A round takes as many leaves as fit into
    `memory_limit_bytes` a device (default: `get_available_memory`), and at least one. Blocks for at
    most `timeout_s` (default 300) a round. Raises ProcessLost when a peer is dead, BarrierTimeout
    naming who did not call it, and ValueError for a leaf with another kind of sharding, or where
    the processes do not call it alike, or there is not one source: on all of them, before the
    devices compute.
    """
    if memory_limit_bytes is None:
        memory_limit_bytes = get_available_memory(in_tree, memory_scaling_factor)
    call = "broadcast_one_replica_to_all"
    axis = global_mesh.axis_names[replica_axis_index]
    results: list[jax.Array] = []
    rounds = list(_rounds(in_tree, memory_limit_bytes))
    lines = [f"the mesh {dict(global_mesh.shape)}, with replicas along {axis!r}"]
    lines += [f"leaves in rounds of {[len(leaves) for leaves in rounds]} (memory_limit_bytes)"]
    lines += [
        f"{leaf.dtype}{list(leaf.shape)} as {getattr(leaf.sharding, 'spec', leaf.sharding)}"
        for leaf in in_tree
    ]
    source = ""
    if is_source:
        own = process_replica_id(
            jax.process_index(), global_mesh, replica_axis_index=replica_axis_index
        )
        source = f"replica {own}"
    check_match(call, lines, deadline_of(timeout_s), source=source)
    for leaves in rounds:
        spread = tuple(_spread(leaf, global_mesh, axis, is_source) for leaf in leaves)
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.delete()
        results += bounded(call, functools.partial(_merged, spread), deadline_of(timeout_s))
    return tuple(results), len(rounds)


def _rounds(leaves: Sequence[Leaf], limit: int) -> Iterator[list[Leaf]]:
    taken: list[Leaf] = []
    for leaf in leaves:
        if taken and tree_memory_per_device([*taken, leaf]) > limit:
            yield taken
            taken = []
        taken.append(leaf)
    if taken:
        yield taken


def _spread(leaf: Leaf, mesh: jax.sharding.Mesh, axis: str, is_source: bool) -> jax.Array:
    """Returns `[replicas, *shape]` over the mesh: the leaf at the source's place, else zeros."""
    named = isinstance(leaf.sharding, NamedSharding)
    if not named or axis in jax.tree.leaves(tuple(leaf.sharding.spec)):
        raise ValueError(
            f"a leaf of shape {leaf.shape} has {leaf.sharding}: expected a NamedSharding over the"
            f" axes of a replica, without {axis!r}"
        )
    sharding = NamedSharding(mesh, PartitionSpec(axis, *tuple(leaf.sharding.spec)[: leaf.ndim]))
    shape = (mesh.shape[axis], *leaf.shape)
    ours = {shard.device: shard.data for shard in leaf.addressable_shards} if is_source else {}
    zeros = np.zeros(sharding.shard_shape(shape), leaf.dtype)
    pieces = [
        jax.device_put(ours[device][None] if device in ours else zeros, device)
        for device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=leaf.dtype)


def _merged(spread: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    shardings: list[Any] = [leaf.sharding for leaf in spread]
    targets = tuple(
        NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) for sharding in shardings
    )
    merged: tuple[jax.Array, ...] = jax.jit(_sum_of_bits, out_shardings=targets)(spread)
    for leaf in merged:
        leaf.block_until_ready()
    return merged


def _sum_of_bits(spread: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(map(_sum, spread))


def _sum(leaf: jax.Array) -> jax.Array:
    """Sums over the replicas, all but one of which are zeros.

    As integers: a sum of floats would lose the sign of a zero.
    """
    if leaf.dtype == jnp.bool_:
        return leaf.any(axis=0)
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(_sum(leaf.real), _sum(leaf.imag))
    bits = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(leaf, bits).sum(axis=0, dtype=bits), leaf.dtype
    )

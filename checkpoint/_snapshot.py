"""Takes what a process owns of a tree off the caller's hands, as views where the host's memory is the device's."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ._plan import Chunk, Plan
from ._tree import flatten


class Snapshot:
    """Holds this process's share of a tree until it is written."""

    def __init__(self, plan: Plan, packs: dict[int, list[Any]], local: list[np.ndarray[Any, Any]], values: list[Any]) -> None:
        self.plan = plan
        self.local = local  # host-local leaves that another rank writes
        self.values = values  # the Python values, in leaf order
        self._packs = packs
        self._done = threading.Event()
        self._done.set()

    def take_pack(self, pack: int) -> list[Any]:
        """Hands over the shards of a pack's chunks, in their order: the snapshot holds them no longer."""
        return self._packs.pop(pack)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the caller may donate or overwrite its arrays; at once unless the host memory bound was below the bytes owned.

        `write_snapshot` must be running meanwhile: it frees the memory that the rest needs.
        """
        return self._done.wait(timeout_s)

    def release(self) -> None:
        """Drops whatever is still held; for a snapshot that will not be written. May be called twice."""
        self._packs.clear()
        self.local.clear()
        self._done.set()


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps the collector from walking the heap while tens of thousands of small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def take_snapshot(plan: Plan, tree: Any, *, host_memory_bytes: int | None = None) -> Snapshot:
    """Starts copying this process's chunks of `tree` to the host and returns; on CPU they are views, numpy leaves are copied.

    `tree` must be the one that `plan` was made of, or one with equal avals and shardings.
    """
    leaves, _ = flatten(tree)
    with paused_gc():
        shards: dict[tuple[int, int], Any] = {}
        packs = {pack: _take(plan, leaves, chunks, shards) for pack, chunks in plan.own.items()}
        local = []
        if plan.process != 0:
            local = [_host_copy(leaves[index]) for index in local_leaves(plan)]
        values = [leaf for leaf, described in zip(leaves, plan.leaves, strict=True) if described.is_value]
    return Snapshot(plan, packs, local, values)


def local_leaves(plan: Plan) -> list[int]:
    """Returns the indices of the leaves that every process has a copy of and rank 0 writes."""
    return [index for index, leaf in enumerate(plan.leaves) if leaf.dtype and leaf.layout is None]


def _take(plan: Plan, leaves: Sequence[Any], chunks: Sequence[Chunk], shards: dict[tuple[int, int], Any]) -> list[Any]:
    taken = []
    for chunk in chunks:
        key = (chunk.leaf, chunk.slot)
        shard = shards.get(key)
        if shard is None:
            leaf = leaves[chunk.leaf]
            if plan.leaves[chunk.leaf].kind == "key":
                leaf = jax.random.key_data(leaf)
            shard = shards[key] = _host_copy(leaf) if chunk.slot < 0 else np.asarray(leaf.addressable_data(chunk.slot))
        taken.append(shard)
    return taken


def _host_copy(leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)
    return np.array(leaf, order="C")


__all__ = ["Snapshot", "local_leaves", "paused_gc", "take_snapshot"]

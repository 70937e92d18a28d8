"""Decides who writes which chunk into which pack: a pure function of shapes, dtypes and where the
shards lie. No jax, no I/O.

A leaf is cut into a grid of chunks: along each axis into the shards of its sharding, and those,
along the leading axes, until a chunk has at most CHUNK_BYTES. Each chunk has one writer among the
ranks that hold it. First all chunks with one holder are counted; then the replicated leaves,
largest first, go to the least loaded of their holders (few chunks) or round by rotation (many). So
that one restoring process need not open a pack of every process for its biases, no more ranks share
in replicated leaves than have SHARE_BYTES each to write.

The chunks of one rank, in the order of leaves and their grids, are split into packs of about equal
weight. All of it is index arithmetic on whole grids, since a job may have thousands of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..format.grid import Chunk, Grid, Ints, chunk_name
from ..format.pack_header import HEADER_BYTES

CHUNK_BYTES = 64 << 20

SHARED_CHUNK_BYTES = 4 << 20  # replicated leaves are cut no smaller than this to be shared out

SHARE_BYTES = 16 << 20  # of replicated leaves, at least this much for each rank that takes part

PACK_BYTES = 8 << 20  # no second pack before the first has this much

PACKS = 4  # files that a rank writes side by side

PACK_CHUNKS = 200_000  # of about 100 bytes each in the header, of which safetensors reads 100 MB

CHUNK_WEIGHT = 512  # what a chunk costs beside its bytes

FEW_CHUNKS = 64


@dataclass(frozen=True, eq=False)
class ShardPlacement:
    """Where the shards of an array lie.

    `ranks` is [shards, replicas], shards in C order: the rank that holds each replica (-1: nobody
    of the group). `slots` is, at the holder of a replica, the index of its addressable shard (-1
    elsewhere).
    """

    shards_per_axis: tuple[int, ...]
    ranks: Ints
    slots: Ints

    @cached_property
    def holders(self) -> tuple[Ints, Ints]:
        """The distinct ranks that hold each shard, ascending, [shards, most], and how many there
        are of them, [shards].
        """
        ranks = np.sort(self.ranks, axis=1)
        first = ranks >= 0
        first[:, 1:] &= ranks[:, 1:] != ranks[:, :-1]
        order = np.argsort(~first, axis=1, kind="stable")
        counts = first.sum(axis=1)
        return (
            np.take_along_axis(ranks, order, axis=1)[:, : max(1, int(counts.max(initial=1)))],
            counts,
        )

    def without(self, leaving: Collection[int]) -> ShardPlacement:
        """Returns the placement in which ranks that leave hold nothing that one which stays holds
        too.
        """
        gone = np.isin(self.ranks, list(leaving))
        stays = ((self.ranks >= 0) & ~gone).any(axis=1, keepdims=True)
        return replace(self, ranks=np.where(gone & stays, -1, self.ranks))

    def is_only_holder(self, rank: int) -> bool:
        """Returns whether there is a shard that no other rank holds."""
        holders, counts = self.holders
        return bool(((counts == 1) & (holders[:, 0] == rank)).any())


@dataclass(frozen=True)
class Leaf:
    """One leaf. `kind` is "array", "key" (typed PRNG keys; dtype and shape are those of their
    data), "numpy", "scalar" (of numpy) or the name of a Python type, whose value lies in the
    record.

    `placement` None: host-local, rank 0 writes it whole. `per_process`: every rank has its own, of
    the same shape, and writes it as its row of [ranks, *shape], which is then the shape here.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    itemsize: int = 0
    placement: ShardPlacement | None = None
    sharding: Any = None  # of JSON types
    impl: str = ""
    per_process: bool = False

    @property
    def is_value(self) -> bool:
        return not self.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class LeafPlan:
    """The grid of a leaf, and in C order of its chunks who writes each and into which of the
    writer's packs.
    """

    leaf: Leaf
    grid: Grid
    writers: Ints
    packs: Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """What each process writes of one tree, the same on every process but for `own`.

    `hash` is the SHA-256, in hex, of its canonical description. `own` are the chunks of this
    process by pack, in the order of the file. `own_bytes` is what this process writes,
    `total_bytes` what all write. `cache` holds what other modules derive from the plan once.
    """

    hash: str
    process: int
    process_count: int
    tree: Any
    leaves: tuple[Leaf, ...]
    arrays: tuple[LeafPlan | None, ...]  # None: a Python value
    files: tuple[tuple[int, int], ...]  # (rank, pack), sorted
    own: dict[int, tuple[Chunk, ...]]
    own_bytes: int
    total_bytes: int
    cache: dict[str, Any] = field(default_factory=dict)

    def held_only_by(self, rank: int) -> list[str]:
        """Returns the paths of the leaves that are lost, in whole or in part, with one rank: no
        other holds what it holds of them.
        """
        return [
            leaf.path
            for leaf in self.leaves
            if leaf.placement is not None and leaf.placement.is_only_holder(rank)
        ]

    @cached_property
    def value_leaves(self) -> tuple[Leaf, ...]:
        """The leaves that are Python values, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.is_value)

    @cached_property
    def local_leaves(self) -> tuple[int, ...]:
        """The indices of the arrays that every process has a copy of and rank 0 writes."""
        return tuple(
            index
            for index, leaf in enumerate(self.leaves)
            if not leaf.is_value and leaf.placement is None
        )


def make_plan(
    tree: Any,
    leaves: Sequence[Leaf],
    rank: int = 0,
    count: int = 1,
    *,
    max_file_bytes: int | None = None,
) -> Plan:
    """Returns the plan of leaves whose tree is described by `tree`; ranks are 0 to count - 1."""
    grids = _grids(leaves)
    cut = [(leaf, grid) for leaf, grid in zip(leaves, grids, strict=True) if grid is not None]
    ends = np.cumsum([grid.num_chunks for _, grid in cut], dtype=np.int64)
    sizes = np.concatenate([grid.sizes for _, grid in cut]) if cut else np.zeros(0, np.int64)
    writers = np.concatenate(_writers(cut, count)) if cut else np.zeros(0, np.int64)
    packs = _packs(writers, sizes, count, max_file_bytes)
    planned = zip(cut, np.split(writers, ends[:-1]), np.split(packs, ends[:-1]), strict=bool(cut))
    plans = (LeafPlan(leaf, grid, writer, pack) for (leaf, grid), writer, pack in planned)
    arrays = tuple(None if grid is None else next(plans) for grid in grids)
    own = _own_chunks(leaves, arrays, rank)
    return Plan(
        hash=_digest([count, tree], leaves, [grid for _, grid in cut], writers, packs),
        process=rank,
        process_count=count,
        tree=tree,
        leaves=tuple(leaves),
        arrays=arrays,
        files=_files(writers, packs),
        own=own,
        own_bytes=sum(chunk.nbytes for chunks in own.values() for chunk in chunks),
        total_bytes=sum(leaf.nbytes for leaf in leaves),
    )


def _grids(leaves: Sequence[Leaf]) -> list[Grid | None]:
    """Returns the grids of the arrays; equal ones are one object."""
    known: dict[Any, Grid] = {}
    grids: list[Grid | None] = []
    for leaf in leaves:
        key = (leaf.shape, leaf.itemsize, id(leaf.placement))
        if not leaf.is_value and key not in known:
            known[key] = _grid(leaf)
        grids.append(None if leaf.is_value else known[key])
    return grids


def _grid(leaf: Leaf) -> Grid:
    shape = leaf.shape
    if not math.prod(shape):
        return Grid(shape, shape, shape, leaf.itemsize)
    shards_per_axis = leaf.placement.shards_per_axis if leaf.placement else (1,) * len(shape)
    shard_shape = tuple(size // count for size, count in zip(shape, shards_per_axis, strict=True))
    limit_bytes = CHUNK_BYTES
    if leaf.placement is not None and (holders := leaf.placement.holders[0].shape[1]) > 1:
        limit_bytes = min(
            limit_bytes,
            max(SHARED_CHUNK_BYTES, -(-math.prod(shard_shape) * leaf.itemsize // holders)),
        )
    return Grid(
        shape, shard_shape, _chunk_shape(shard_shape, leaf.itemsize, limit_bytes), leaf.itemsize
    )


def _chunk_shape(shard_shape: tuple[int, ...], itemsize: int, limit_bytes: int) -> tuple[int, ...]:
    """Cuts a shard along its leading axes until a chunk has at most `limit_bytes`; chunks are as
    equal as can be.
    """
    chunk_shape = list(shard_shape)
    for axis, size in enumerate(shard_shape):
        row_bytes = math.prod(shard_shape[axis + 1 :]) * itemsize
        if row_bytes * size <= limit_bytes:
            break
        count = -(-size // max(1, limit_bytes // row_bytes))
        chunk_shape[axis] = -(-size // count)
        if row_bytes <= limit_bytes:
            break
    return tuple(chunk_shape)


def _writers(arrays: Sequence[tuple[Leaf, Grid]], count: int) -> list[Ints]:
    """Returns the writer of each chunk of each array."""
    writers: list[Ints] = [np.zeros(0, np.int64)] * len(arrays)
    load = np.zeros(count, np.int64)
    shared: list[int] = []
    for index, (leaf, grid) in enumerate(arrays):
        if leaf.placement is not None and leaf.placement.holders[0].shape[1] > 1:
            shared.append(index)
            continue
        writers[index] = (
            np.zeros(grid.num_chunks, np.int64)
            if leaf.placement is None
            else leaf.placement.holders[0][grid.shards, 0]
        )
        load += np.bincount(writers[index], weights=grid.sizes, minlength=count).astype(np.int64)
    most = max(1, -(-sum(arrays[index][0].nbytes for index in shared) // SHARE_BYTES))
    rotation = 0
    for index in sorted(shared, key=lambda index: -arrays[index][0].nbytes):
        leaf, grid = arrays[index]
        assert leaf.placement is not None
        writers[index] = _writers_of_replicated(leaf.placement, grid, most, load, rotation)
        rotation += grid.num_chunks
    return writers


def _writers_of_replicated(
    placement: ShardPlacement, grid: Grid, most: int, load: Ints, rotation: int
) -> Ints:
    """Returns the writer of each chunk of one replicated leaf, and adds the chunks to `load`."""
    holders, counts = placement.holders
    holders, counts = holders[grid.shards], np.minimum(counts[grid.shards], most)
    if grid.num_chunks > FEW_CHUNKS:
        writers: Ints = holders[
            np.arange(grid.num_chunks), (rotation + np.arange(grid.num_chunks)) % counts
        ]
        load += np.bincount(writers, weights=grid.sizes, minlength=len(load)).astype(np.int64)
        return writers
    chosen = []
    for row, held, size in zip(holders, counts, grid.sizes, strict=True):
        writer = row[np.argmin(load[row[:held]])]
        load[writer] += size
        chosen.append(writer)
    return np.array(chosen, np.int64)


def _packs(writers: Ints, sizes: Ints, count: int, max_file_bytes: int | None) -> Ints:
    """Returns the pack of each chunk among its writer's: consecutive runs of about equal weight."""
    weights = sizes + CHUNK_WEIGHT
    load = np.bincount(writers, weights=weights, minlength=count).astype(np.int64)
    packs = np.minimum(PACKS, load // PACK_BYTES)
    packs = np.maximum(
        packs, np.maximum(1, -(-np.bincount(writers, minlength=count) // PACK_CHUNKS))
    )
    if max_file_bytes is not None:
        packs = np.maximum(packs, -(-load // (max_file_bytes - CHUNK_BYTES - HEADER_BYTES)))
    order = np.argsort(writers.astype(np.uint16) if count < 1 << 16 else writers, kind="stable")
    before = np.empty_like(weights)
    before[order] = np.cumsum(weights[order]) - weights[order]
    before -= (np.cumsum(load) - load)[writers]
    middle = before + weights // 2
    found: Ints = np.minimum(
        middle * packs[writers] // np.maximum(load[writers], 1), packs[writers] - 1
    )
    return found


def _own_chunks(
    leaves: Sequence[Leaf], arrays: Sequence[LeafPlan | None], rank: int
) -> dict[int, tuple[Chunk, ...]]:
    found: dict[int, list[Chunk]] = {}
    for index, array in enumerate(arrays):
        if array is None:
            continue
        for position in np.flatnonzero(array.writers == rank).tolist():
            found.setdefault(int(array.packs[position]), []).append(
                _chunk(index, array, position, rank)
            )
    return {pack: tuple(sorted(chunks, key=_file_order)) for pack, chunks in sorted(found.items())}


def _file_order(chunk: Chunk) -> tuple[bool, int]:
    """Puts chunks of whole 64 bytes first, then by falling item size: all are aligned, with no
    holes.
    """
    return chunk.nbytes % 64 != 0, -chunk.itemsize


def _chunk(index: int, array: LeafPlan, position: int, rank: int) -> Chunk:
    leaf = array.leaf
    grid = array.grid
    region = grid.region(position)
    shape = tuple(stop - start for start, stop in region)
    slot = -1
    inside = None
    if leaf.placement is not None:
        shard = grid.shards[position]
        slot = int(leaf.placement.slots[shard][leaf.placement.ranks[shard] == rank][0])
    if shape != grid.shard_shape:
        inside = tuple(
            slice(start % along, start % along + size)
            for (start, _), along, size in zip(region, grid.shard_shape, shape, strict=True)
        )
    name = chunk_name(leaf.path, region, leaf.shape)
    return Chunk(index, slot, inside, name, shape, math.prod(shape) * leaf.itemsize, leaf.itemsize)


def local_chunks(plan: Plan, leaf: int) -> list[Chunk]:
    """Returns the chunks of a host-local leaf, in the order of its grid, as rank 0 writes them."""
    array = plan.arrays[leaf]
    assert array is not None and array.leaf.placement is None
    return [_chunk(leaf, array, position, 0) for position in range(array.grid.num_chunks)]


def _files(writers: Ints, packs: Ints) -> tuple[tuple[int, int], ...]:
    width = int(packs.max(initial=0)) + 1
    return tuple(
        divmod(key, width) for key in np.flatnonzero(np.bincount(writers * width + packs)).tolist()
    )


def _digest(
    about: Any, leaves: Sequence[Leaf], grids: Sequence[Grid], writers: Ints, packs: Ints
) -> str:
    shardings: dict[int, int] = {}  # equal ones are one object, whose text may be long
    for leaf in leaves:
        shardings.setdefault(id(leaf.sharding), len(shardings))
    unique = list({id(leaf.sharding): leaf.sharding for leaf in leaves}.values())
    rows = [
        (
            leaf.path,
            leaf.kind,
            leaf.dtype,
            leaf.shape,
            leaf.impl,
            leaf.per_process,
            shardings[id(leaf.sharding)],
        )
        for leaf in leaves
    ]
    cuts = [(grid.shard_shape, grid.chunk_shape) for grid in grids]
    digest = hashlib.sha256(json.dumps([about, unique, rows, cuts], sort_keys=True).encode())
    digest.update(writers.astype("<i8").tobytes())
    digest.update(packs.astype("<i8").tobytes())
    return digest.hexdigest()

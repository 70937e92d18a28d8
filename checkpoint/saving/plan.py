"""Decides who writes which chunk into which pack. No jax, no I/O.

The plan is a pure function of shapes, dtypes and where the shards lie: every process makes the same
one, without a message. A leaf is cut into a grid of chunks: along each axis into the shards of its
sharding, and those, along the leading axes, until a chunk has at most CHUNK_BYTES. Each chunk has
one writer among the ranks that hold it. First all chunks with one holder are counted; then the
replicated leaves, largest first, go to the least loaded of their holders (few chunks) or round by
rotation (many). So that one restoring process need not open a pack of every process for its biases,
no more ranks share in replicated leaves than have SHARE_BYTES each to write.

The chunks of one rank, in the order of leaves and their grids, are split into packs of about equal
weight. All of it is index arithmetic on whole grids, since a job may have thousands of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..format.grid import Chunk, Grid, Ints, Shape, chunk_name
from ..format.pack_header import HEADER_BYTES

T = TypeVar("T")
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

    shards_per_axis: Shape
    ranks: Ints
    slots: Ints

    @cached_property
    def holders(self) -> tuple[Ints, Ints]:
        """The distinct ranks that hold each shard, [shards, most], and how many, [shards].

        They ascend. What is beyond a shard's count is no holder.
        """
        ranks = np.sort(self.ranks, axis=1)
        first = ranks >= 0
        first[:, 1:] &= ranks[:, 1:] != ranks[:, :-1]
        order = np.argsort(~first, axis=1, kind="stable")
        counts = first.sum(axis=1)
        most = max(1, int(counts.max(initial=1)))
        return np.take_along_axis(ranks, order, axis=1)[:, :most], counts

    @cached_property
    def has_replicas(self) -> bool:
        """Whether a shard is there more than once, be it on one rank."""
        return bool(((self.ranks >= 0).sum(axis=1) > 1).any())

    @property
    def is_replicated(self) -> bool:
        """Whether a shard has more than one holder."""
        return int(self.holders[0].shape[1]) > 1

    def shard_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the shards of an array of this shape."""
        return tuple(size // count for size, count in zip(shape, self.shards_per_axis, strict=True))

    def without(self, leaving: Collection[int]) -> ShardPlacement:
        """Returns the placement in which ranks that leave hold only what no other rank holds."""
        gone = np.isin(self.ranks, list(leaving))
        stays = ((self.ranks >= 0) & ~gone).any(axis=1, keepdims=True)
        return replace(self, ranks=np.where(gone & stays, -1, self.ranks))

    def is_only_holder(self, rank: int) -> bool:
        """Returns whether there is a shard that no other rank holds."""
        holders, counts = self.holders
        return bool(((counts == 1) & (holders[:, 0] == rank)).any())


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf.

    `kind` is "array", "key" (typed PRNG keys; dtype and shape are those of their data), "numpy",
    "scalar" (of numpy) or the name of a Python type, whose value lies in the record. `placement`
    None: host-local, rank 0 writes it whole. `per_process`: every rank has its own, of the same
    shape, and writes it as its row of [ranks, *shape], which is then the shape here. `weak`: an
    array of jax's of a weak type.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: Shape = ()
    itemsize: int = 0
    placement: ShardPlacement | None = None
    sharding: Any = None  # of JSON types
    impl: str = ""
    per_process: bool = False
    weak: bool = False

    @property
    def is_value(self) -> bool:
        return not self.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """The grid of a leaf, and for each chunk in C order its writer and the writer's pack."""

    leaf: Leaf
    grid: Grid
    writers: Ints
    packs: Ints


# The arrays and their grids, in the order of the leaves.
Cut: TypeAlias = Sequence[tuple[Leaf, Grid]]


class Deal(NamedTuple):
    """The writer of each chunk, in the order of leaves and their grids, and the writer's pack."""

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
    deal: Deal  # that of all arrays
    files: tuple[tuple[int, int], ...]  # (rank, pack), sorted
    own: dict[int, tuple[Chunk, ...]]
    own_bytes: int
    total_bytes: int
    statics: Mapping[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """Returns what `make` derives from the plan; it is called once a plan, for each `what`."""
        if what not in self.cache:
            self.cache[what] = make()
        derived: T = self.cache[what]
        return derived

    def held_only_by(self, rank: int) -> list[str]:
        """Returns the paths of the leaves that are lost, in whole or in part, with one rank."""
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
    statics: Mapping[str, Any] | None = None,
    max_file_bytes: int | None = None,
) -> Plan:
    """Returns the plan of leaves whose tree is described by `tree`, and by the `statics` of its
    nodes; ranks are 0 to count - 1.
    """
    statics = statics or {}
    grids = _grids(leaves)
    cut = [(leaf, grid) for leaf, grid in zip(leaves, grids, strict=True) if grid is not None]
    deal = _deal(cut, count, max_file_bytes)
    plans = iter(_leaf_plans(cut, deal))
    arrays = tuple(None if grid is None else next(plans) for grid in grids)
    own = _own_chunks(arrays, rank)
    return Plan(
        hash=_digest([count, tree, statics], leaves, [grid for _, grid in cut], deal),
        process=rank,
        process_count=count,
        tree=tree,
        leaves=tuple(leaves),
        arrays=arrays,
        deal=deal,
        files=_files(deal),
        own=own,
        own_bytes=sum(chunk.nbytes for chunks in own.values() for chunk in chunks),
        total_bytes=sum(leaf.nbytes for leaf in leaves),
        statics=statics,
    )


def _deal(cut: Cut, count: int, max_file_bytes: int | None) -> Deal:
    nothing = np.zeros(0, np.int64)
    writers = np.concatenate([nothing, *_writers(cut, count)])
    sizes = np.concatenate([nothing, *(grid.sizes for _, grid in cut)])
    return Deal(writers, _packs(writers, sizes, count, max_file_bytes))


def _leaf_plans(cut: Cut, deal: Deal) -> list[LeafPlan]:
    plans = []
    end = 0
    for leaf, grid in cut:
        start = end
        end += grid.num_chunks
        plans.append(LeafPlan(leaf, grid, deal.writers[start:end], deal.packs[start:end]))
    return plans


def _grids(leaves: Sequence[Leaf]) -> list[Grid | None]:
    """Returns the grids of the arrays; equal ones are one object."""
    # A placement is one object for all leaves of one sharding.
    grid = cache(_grid)
    return [
        None if leaf.is_value else grid(leaf.shape, leaf.itemsize, leaf.placement)
        for leaf in leaves
    ]


def _grid(shape: Shape, itemsize: int, placement: ShardPlacement | None) -> Grid:
    if not math.prod(shape):
        return Grid(shape, shape, shape, itemsize)
    shard_shape = shape
    limit_bytes = CHUNK_BYTES
    if placement is not None:
        shard_shape = placement.shard_shape(shape)
        if placement.is_replicated:
            # Small enough that each holder can write its part of a shard.
            holders = placement.holders[0].shape[1]
            share_bytes = -(-math.prod(shard_shape) * itemsize // holders)
            limit_bytes = min(limit_bytes, max(SHARED_CHUNK_BYTES, share_bytes))
    chunk_shape = _chunk_shape(shard_shape, itemsize, limit_bytes)
    return Grid(shape, shard_shape, chunk_shape, itemsize)


def _chunk_shape(shard_shape: Shape, itemsize: int, limit_bytes: int) -> Shape:
    """Cuts a shard along its leading axes until a chunk has at most `limit_bytes`."""
    # Leading axes: so cut, a chunk is one stretch of a shard in C order, and needs no copy.
    chunk_shape = list(shard_shape)
    for axis, size in enumerate(shard_shape):
        row_bytes = math.prod(shard_shape[axis + 1 :]) * itemsize
        if row_bytes * size <= limit_bytes:
            break
        count = -(-size // max(1, limit_bytes // row_bytes))
        chunk_shape[axis] = -(-size // count)  # as equal as can be
        if row_bytes <= limit_bytes:
            break
    return tuple(chunk_shape)


def _writers(arrays: Cut, count: int) -> list[Ints]:
    """Returns the writer of each chunk of each array."""
    writers: list[Ints] = [np.zeros(0, np.int64)] * len(arrays)
    load = np.zeros(count, np.int64)
    shared = []
    for index, (leaf, grid) in enumerate(arrays):
        placement = leaf.placement
        if placement is not None and placement.is_replicated:
            shared.append(index)
            continue
        if placement is None:
            writers[index] = np.zeros(grid.num_chunks, np.int64)
        else:
            writers[index] = placement.holders[0][grid.shards, 0]
        load += np.bincount(writers[index], weights=grid.sizes, minlength=count).astype(np.int64)
    # Each rank that takes part adds a pack, which a restore on one process has to open.
    most = max(1, -(-sum(arrays[index][0].nbytes for index in shared) // SHARE_BYTES))
    rotation = 0
    # Largest first: the small ones even out what the large ones leave uneven.
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
    shard_holders, shard_counts = placement.holders
    holders = shard_holders[grid.shards]
    counts = np.minimum(shard_counts[grid.shards], most)
    if grid.num_chunks > FEW_CHUNKS:
        # A choice by load is a loop in Python; of many chunks turns are as even, by arithmetic.
        chunks = np.arange(grid.num_chunks)
        writers: Ints = holders[chunks, (rotation + chunks) % counts]
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
    fewest = np.maximum(1, -(-np.bincount(writers, minlength=count) // PACK_CHUNKS))
    packs = np.maximum(np.minimum(PACKS, load // PACK_BYTES), fewest)
    if max_file_bytes is not None:
        # A pack may be larger than its share by one chunk.
        packs = np.maximum(packs, -(-load // (max_file_bytes - CHUNK_BYTES - HEADER_BYTES)))
    # numpy sorts 16-bit integers by radix, in a tenth of the time.
    narrow = writers.astype(np.uint16) if count < 1 << 16 else writers
    order = np.argsort(narrow, kind="stable")
    before = np.empty_like(weights)
    before[order] = np.cumsum(weights[order]) - weights[order]
    before -= (np.cumsum(load) - load)[writers]
    middle = before + weights // 2
    of_writer = packs[writers]
    dealt: Ints = np.minimum(middle * of_writer // np.maximum(load[writers], 1), of_writer - 1)
    return dealt


def _own_chunks(arrays: Sequence[LeafPlan | None], rank: int) -> dict[int, tuple[Chunk, ...]]:
    own: dict[int, list[Chunk]] = {}
    for index, array in enumerate(arrays):
        if array is None:
            continue
        for position in np.flatnonzero(array.writers == rank).tolist():
            chunk = _chunk(index, array, position, rank)
            own.setdefault(int(array.packs[position]), []).append(chunk)
    return {pack: tuple(sorted(chunks, key=_file_order)) for pack, chunks in sorted(own.items())}


def _file_order(chunk: Chunk) -> tuple[bool, int]:
    """Puts chunks of whole 64 bytes first, then by falling item size."""
    # safetensors allows no holes: in this order each chunk is aligned to its items all the same.
    return chunk.nbytes % 64 != 0, -chunk.itemsize


def _chunk(index: int, array: LeafPlan, position: int, rank: int) -> Chunk:
    leaf = array.leaf
    grid = array.grid
    region = grid.region(position)
    shape = tuple(stop - start for start, stop in region)
    inside = None
    if shape != grid.shard_shape:
        inside = tuple(
            slice(start % along, start % along + size)
            for (start, _), along, size in zip(region, grid.shard_shape, shape, strict=True)
        )
    return Chunk(
        index,
        _slot(leaf.placement, grid, position, rank),
        inside,
        chunk_name(leaf.path, region, leaf.shape),
        shape=shape,
        nbytes=math.prod(shape) * leaf.itemsize,
        itemsize=leaf.itemsize,
    )


def _slot(placement: ShardPlacement | None, grid: Grid, position: int, rank: int) -> int:
    """Returns the addressable shard of a rank that a chunk is in, -1 for the host's whole array."""
    if placement is None:
        return -1
    shard = grid.shards[position]
    return int(placement.slots[shard][placement.ranks[shard] == rank][0])


def local_chunks(plan: Plan, leaf: int) -> list[Chunk]:
    """Returns the chunks of a host-local leaf, in the order of its grid, as rank 0 writes them."""
    array = plan.arrays[leaf]
    assert array is not None and array.leaf.placement is None
    return [_chunk(leaf, array, position, 0) for position in range(array.grid.num_chunks)]


def _files(deal: Deal) -> tuple[tuple[int, int], ...]:
    """Returns the (rank, pack) that have chunks."""
    width = int(deal.packs.max(initial=0)) + 1
    keys = np.flatnonzero(np.bincount(deal.writers * width + deal.packs))
    return tuple(divmod(key, width) for key in keys.tolist())


def _digest(about: Any, leaves: Sequence[Leaf], grids: Sequence[Grid], deal: Deal) -> str:
    # The text of a sharding is long on a large mesh, and equal shardings are one object here: each
    # is described once.
    unique = list({id(leaf.sharding): leaf.sharding for leaf in leaves}.values())
    shardings = {id(sharding): number for number, sharding in enumerate(unique)}
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
    digest.update(deal.writers.astype("<i8").tobytes())
    digest.update(deal.packs.astype("<i8").tobytes())
    return digest.hexdigest()

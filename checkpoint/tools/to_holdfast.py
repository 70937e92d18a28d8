"""Writes what a source of any layout holds as a step of ours, without ever holding all of it.

The plan is made of the source's records instead of live arrays, with the source's own grid as far as it has one; each pack is written
while its chunks are read, in their order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from holdfast.multihost import Solo

from ..errors import CommitUnknown, StepExists
from ..format.dtypes import dtype_named
from ..format.files import FileReport, ItemReport, encode_value, pack_name
from ..format.grid import Chunk, Grid
from ..format.limits import encode_json
from ..format.record import ItemRecord, LeafRecord
from ..format.tree import describe, flatten, rebuild
from ..layouts.base import CheckpointReader, fresh
from ..options import Options
from ..restoring.devices import Region
from ..restoring.reader import ArrayReader, ReadRequest
from ..saving.commit import commit_record
from ..saving.pack_writer import pack_parts, plan_pack, write_json
from ..saving.plan import CHUNK_BYTES, Leaf, Plan, ShardPlacement, make_plan
from ..saving.record_builder import build_record
from ..steps.claims import FOLDER, Claims, LocalClaims
from ..steps.garbage import delete_save
from ..steps.object_claims import ObjectClaims
from ..steps.opening import give_up_claim, open_root
from ..storage.base import Storage, counted, run_side_by_side
from ..storage.object import ObjectStorage
from ..storage.path import StorePath, join

AHEAD_BYTES = 16 << 20  # of small chunks, read together
MAX_PARTS = 4096  # a source that is cut finer than this is read as if it were whole
LANES = 2  # packs written side by side: each holds two chunks, or for an object store itself twice


def to_holdfast(
    source: CheckpointReader,
    chosen: Mapping[str, tuple[ItemRecord, ArrayReader]],
    root: StorePath,
    claims: Claims | None,
    progress: Callable[[int], None],
) -> str:
    """Writes the chosen items, and the JSON items of `source`, as a step of `root`; returns where it is. Raises StepExists."""
    storage, step = root.storage, source.info.step or 0
    claims = claims or (ObjectClaims(storage) if isinstance(storage, ObjectStorage) else LocalClaims(storage))
    opened = open_root(storage, claims, Solo(), Options())
    try:
        if step in opened.steps or step in opened.foreign:
            raise StepExists(f"step {step} is already in {root}; choose another place or delete it first", path=str(root), step=step)
        names = [*chosen, *(name for name, kind in source.info.items.items() if kind == "json")]
        try:
            _write(source, chosen, storage, step, opened.writer.id, progress)
        except CommitUnknown:
            raise
        except BaseException:
            delete_save(storage, step, names, 0, opened.writer.id)
            raise
    finally:
        give_up_claim(storage, claims, opened.writer)
    return str(root / str(step))


def _write(
    source: CheckpointReader,
    chosen: Mapping[str, tuple[ItemRecord, ArrayReader]],
    storage: Storage,
    step: int,
    tag: str,
    progress: Callable[[int], None],
) -> None:
    started_s, info = time.time(), source.info
    items: dict[str, tuple[Plan | None, list[ItemReport]]] = {}
    for name, (item, reader) in chosen.items():
        items[name] = write_item(item, reader, storage, str(step), tag, progress)
    for name, kind in info.items.items():
        if kind == "json":
            items[name] = (None, [write_json(storage, str(step), name, tag, 0, encode_json(source.json(name), f"the item {name!r}"))])
    metrics = {name: value for name, value in info.metrics.items() if isinstance(value, (int, float))}
    processes = max([len(reports) for _, reports in items.values()], default=1)
    facts = {"started_s": started_s, "finished_s": time.time(), "metrics": metrics, "metadata": info.metadata}
    record = build_record(step, items, writer=tag, processes=processes, **facts)
    commit_record(storage, str(step), record, f"{FOLDER}/{tag}", tag)


def write_item(
    item: ItemRecord, reader: ArrayReader, storage: Storage, step_dir: str, tag: str, progress: Callable[[int], None]
) -> tuple[Plan, list[ItemReport]]:
    """Writes the packs of one item; returns the plan and the reports that the record is made of. At most a few chunks are in memory."""
    tree, found = _in_order(item)
    layouts: dict[Any, ShardPlacement | None] = {}
    plan = make_plan(tree, [_leaf(leaf, path, layouts) for leaf, path in found], max_file_bytes=storage.max_file_bytes)
    whole = replace(plan, own={pack: tuple(replace(chunk, inside=None) for chunk in chunks) for pack, chunks in plan.own.items()}, cache={})
    leaves = [leaf for leaf, _ in found]

    def write(pack: int) -> FileReport:
        planned, crcs = plan_pack(whole, pack), list[int]()
        stream = _Stream(reader, [_wanted(plan, chunk, leaves[chunk.leaf]) for chunk in plan.own[pack]])
        name = pack_name(0, pack, tag)
        parts = counted(pack_parts(planned, stream.shards(), crcs), progress)
        storage.write(join(step_dir, item.name, name), planned.size, parts)
        return FileReport(name, planned.size, planned.head_bytes, crc32c(planned.header(crcs)))

    files = run_side_by_side(write, list(plan.own), LANES)
    return plan, _reports(plan, files, leaves)


def _reports(plan: Plan, files: Sequence[FileReport], leaves: Sequence[LeafRecord]) -> list[ItemReport]:
    """Returns a report as of one process that wrote all, and one more for each process that values were kept for."""
    values = [leaf for leaf in leaves if leaf.grid is None]
    first = tuple(encode_value(leaf.value[0] if leaf.per_process else leaf.value) for leaf in values)
    reports = [ItemReport(0, plan.hash, tuple(files), (), first)]
    own = [leaf.value for leaf in values if leaf.per_process]
    for process in range(1, max(map(len, own), default=1)):
        reports.append(ItemReport(process, plan.hash, (), (), tuple(encode_value(value[process]) for value in own)))
    return reports


def _in_order(item: ItemRecord) -> tuple[Any, list[tuple[LeafRecord, str]]]:
    """Returns the description of the tree and its leaves with their paths in our layout, in flatten order."""
    skeleton = rebuild(item.tree, list(range(len(item.leaves))))
    description, paths = describe(skeleton)
    order = flatten(skeleton)[0]
    tree = item.tree if order == sorted(order) else description  # the item's own names the types
    return tree, [(item.leaves[index], path) for index, path in zip(order, paths, strict=True)]


def _leaf(leaf: LeafRecord, path: str, layouts: dict[Any, ShardPlacement | None]) -> Leaf:
    if leaf.grid is None:
        return Leaf(path, leaf.kind, per_process=leaf.per_process)
    dtype = dtype_named(leaf.dtype)
    assert dtype is not None
    parts = tuple(size // part if part else 1 for size, part in zip(leaf.shape, leaf.grid.shard_shape, strict=True))
    if parts not in layouts:
        layouts[parts] = _layout(parts)
    return Leaf(path, leaf.kind, leaf.dtype, leaf.shape, dtype.itemsize, layouts[parts], leaf.sharding, leaf.impl, leaf.per_process)


def _layout(parts: tuple[int, ...]) -> ShardPlacement | None:
    """Returns a layout in which one process holds all parts, so that chunks keep within them; None for one part."""
    count = math.prod(parts)
    if not 1 < count <= MAX_PARTS:
        return None
    return ShardPlacement(parts, np.zeros((count, 1), np.int64), np.arange(count, dtype=np.int64)[:, None])


class _Wanted(NamedTuple):
    """A chunk as a region of a stored leaf, and the region that has to be read for it."""

    leaf: LeafRecord
    region: Region
    unit: Region


def _wanted(plan: Plan, chunk: Chunk, leaf: LeafRecord) -> _Wanted:
    layout, grid = plan.leaves[chunk.leaf].placement, leaf.grid
    assert grid is not None
    part, base = leaf.shape, [0] * len(leaf.shape)
    if layout is not None:
        part = tuple(size // count for size, count in zip(leaf.shape, layout.shards_per_axis, strict=True))
        base = [int(at) * size for at, size in zip(np.unravel_index(chunk.slot, layout.shards_per_axis), part, strict=True)]
    whole = tuple((start, start + size) for start, size in zip(base, part, strict=True))
    region = whole
    if chunk.inside is not None:
        region = tuple((start + cut.start, start + cut.stop) for start, cut in zip(base, chunk.inside, strict=True))
    return _Wanted(leaf, region, region if _reads_in_pieces(grid, leaf) else whole)


def _reads_in_pieces(grid: Grid, leaf: LeafRecord) -> bool:
    """Says whether the source can read a chunk's worth of a leaf without reading much more."""
    dtype = dtype_named(leaf.dtype)
    assert dtype is not None
    return math.prod(grid.chunk_shape) * dtype.itemsize <= CHUNK_BYTES


class _Stream:
    """Reads what one pack needs, in the pack's order: small chunks several at once, and what the source reads only whole once."""

    def __init__(self, reader: ArrayReader, wanted: Sequence[_Wanted]) -> None:
        self._reader, self._wanted = reader, wanted
        self._ready: dict[int, Any] = {}
        self._held: tuple[Any, Any] = (None, None)

    def shards(self) -> list[Any]:
        """Returns what stands for the chunks until they are read."""
        return [_Later(self, index) for index in range(len(self._wanted))]

    def take(self, index: int) -> Any:
        """Returns a chunk's array, once."""
        if index not in self._ready:
            wanted = self._wanted[index]
            if wanted.unit != wanted.region:
                return self._cut(wanted)
            self._read_ahead(index)
        return self._ready.pop(index)

    def _read_ahead(self, index: int) -> None:
        targets: list[ReadRequest] = []
        size = 0
        for wanted in self._wanted[index:]:
            target = ReadRequest(wanted.leaf, wanted.region)
            size += target.nbytes
            if targets and (wanted.unit != wanted.region or size > AHEAD_BYTES):
                break
            targets.append(target)
        self._reader.fill(targets, fresh)
        self._ready.update((index + offset, target.array) for offset, target in enumerate(targets))

    def _cut(self, wanted: _Wanted) -> Any:
        key = id(wanted.leaf), wanted.unit
        if self._held[0] != key:
            self._held = (None, None)  # not both at a time
            target = ReadRequest(wanted.leaf, wanted.unit)
            self._reader.fill([target], fresh)
            self._held = (key, target.array)
        return self._held[1][tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(wanted.region, wanted.unit, strict=True))]


class _Later(NamedTuple):
    """Stands for a chunk that is read when its turn comes."""

    stream: _Stream
    at: int

    def get(self) -> Any:
        """Returns the chunk's array."""
        return self.stream.take(self.at)

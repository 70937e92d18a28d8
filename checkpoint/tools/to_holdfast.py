"""Writes what is converted as a step of holdfast's own, in bounded memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from holdfast.coordination import HoldfastError
from holdfast.multihost import Solo

from ..agreement.save_protocol import Prepared, SaveKey, SaveReport
from ..arrays.dtypes import HostArray
from ..errors import StepExists, UnsupportedLeaf
from ..format.grid import Chunk, Shape
from ..format.item_report import FileReport, ItemReport, pack_name
from ..format.limits import encode_json
from ..format.own_files import StagedFiles, own_names, put_files, scratch_folder
from ..format.record import ItemRecord, LeafRecord, check_record
from ..format.tree import describe, flatten, rebuild
from ..format.values import encode_value
from ..layouts.detect import OTHER_LAYOUTS, ForeignSteps
from ..options import Options
from ..restoring.devices import Region
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import ArrayReader
from ..restoring.view_reader import Wanted, read_in_order
from ..saving.commit import SaveWork, run_protocol
from ..saving.item_files import ItemTarget, write_files, write_json
from ..saving.pack_writer import ChunkSums, lay_out_pack, pack_parts
from ..saving.plan import CHUNK_BYTES, Leaf, Plan, ShardPlacement, make_plan
from ..saving.record_builder import RecordHead, build_record, check_plan
from ..saving.stager import OneSave
from ..steps.claims import Claims
from ..steps.opening import give_up_claim, open_root
from ..storage.counting import count_parts
from ..storage.path import StorePath
from ..storage.threads import run_side_by_side
from .conversion import Conversion, Progress

MAX_SHARDS = 4096  # of a leaf: one that is cut finer is read as if it were whole
# Packs written side by side: each holds two chunks in memory, or for an object store itself twice.
PACKS_AT_ONCE = 2


def to_holdfast(conversion: Conversion, root: StorePath, claims: Claims) -> str:
    """Writes the chosen items as a step of `root`.

    Returns where it is. The plan is made of the records instead of live arrays, with their own
    grids as far as they have them. Each pack is written while its chunks are read, in their order.
    Raises StepExists.
    """
    storage = root.storage
    step = conversion.step
    held = open_root(storage, claims, Solo(), Options(), layouts=OTHER_LAYOUTS)
    listing = held.listing
    folder = listing.step_names.name_of(step)
    is_unclear = False
    try:
        if step in listing.steps or step in listing.foreign:
            raise StepExists(
                f"step {step} is already in {root}; choose another place or delete it first",
                path=str(root),
                step=step,
            )
        foreign = ForeignSteps(storage, listing.foreign, listing.step_names)
        save = OneSave(
            root=replace(held, options=replace(held.options, save_timeout_s=math.inf)),
            key=SaveKey(held.writer.id, 0, step),
            folder=folder,
        )
        is_unclear = True
        result = run_protocol(save, _ConversionWork(conversion, save, foreign))
        is_unclear = result.is_unclear
        if result.error is not None:
            cause = result.error.__cause__
            raise cause if isinstance(cause, HoldfastError) and result.deletable else result.error
    finally:
        give_up_claim(held, folder, is_unclear=is_unclear)
    return str(root / folder)


@dataclass(frozen=True)
class _ConversionWork(SaveWork):
    """Writes what is converted, as this one process for all that saved it."""

    conversion: Conversion
    save: OneSave
    foreign: ForeignSteps
    items: dict[str, tuple[Plan | None, list[ItemReport]]] = field(default_factory=dict)

    def write(self) -> Prepared:
        """Writes the packs while their chunks are read, durably."""
        save = self.save
        self.foreign.make_way(save.storage, save.folder, save.claim)
        for name, (item, reader) in self.conversion.chosen.items():
            self.items[name] = write_item(item, reader, save.item(name), self.conversion.progress)
        for name, kind in self.conversion.others.items():
            self.items[name] = (None, self._write_copies(name, kind))
        return Prepared({name: reports[0] for name, (_, reports) in self.items.items()})

    def _write_copies(self, item: str, kind: str) -> list[ItemReport]:
        """Writes an item of JSON or files, the copy of each process that keeps one."""
        write_copy = self._write_json if kind == "json" else self._write_files
        process = self.conversion.process
        owners = self.conversion.checkpoint.info.copies(item) if process is None else [None]
        return [write_copy(item, owner, owner or process or 0) for owner in owners]

    def _write_json(self, item: str, owner: int | None, source: int) -> ItemReport:
        value = self.conversion.checkpoint.json(item, source)
        try:
            data = encode_json(value, f"the item {item!r}")
        except (TypeError, ValueError) as error:
            raise UnsupportedLeaf(str(error), leaf=item) from error
        return write_json(self.save.item(item), owner or 0, data)

    def _write_files(self, item: str, owner: int | None, source: int) -> ItemReport:
        checkpoint = self.conversion.checkpoint
        with scratch_folder() as folder:
            put_files(
                folder, checkpoint.files(item, PerProcessSelection(source)), checkpoint.info.path
            )
            names = tuple(own_names(folder))
            staged = StagedFiles(folder, names, per_process=owner is not None, nbytes=0)
            target = self.save.item(item)
            return write_files(target, owner or 0, staged, self.conversion.progress)

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record: the one report of the save is this work's own."""
        info = self.conversion.checkpoint.info
        metrics = {
            name: value for name, value in info.metrics.items() if isinstance(value, int | float)
        }
        record = build_record(
            RecordHead(
                self.save.step,
                writer=self.save.key.save_id,
                processes=max([len(shares) for _, shares in self.items.values()], default=1),
                started_s=self.save.started_s,
                finished_s=time.time(),
                metrics=metrics,
                metadata=info.metadata,
            ),
            self.items,
        )
        check_record(record, self.save.where)
        return record


def write_item(
    item: ItemRecord, reader: ArrayReader, target: ItemTarget, progress: Progress
) -> tuple[Plan, list[ItemReport]]:
    """Writes the packs of one item; returns the plan and the reports that the record is made of.

    At most a few chunks are in memory.
    """
    tree, paths, leaves = _in_order(item)
    plan = make_plan(
        tree,
        list(map(_leaf, leaves, paths)),
        statics=item.statics,
        max_file_bytes=target.storage.max_file_bytes,
    )
    check_plan(plan)

    def write(pack: int) -> FileReport:
        chunks = plan.own[pack]
        # Each comes cut out of its shard already.
        planned = lay_out_pack(plan, [replace(chunk, inside=None) for chunk in chunks])
        sums = ChunkSums()
        wanted = [_chunk_region(plan, chunk, leaves[chunk.leaf]) for chunk in chunks]
        arrays = [_LazyChunk(read_in_order(reader, wanted))] * len(wanted)
        parts = count_parts(pack_parts(planned, arrays, sums), progress)
        name = pack_name(0, pack, target.save_id)
        target.write(name, planned.size, parts)
        head = planned.frame.join(sums.checksums)
        return FileReport(name, planned.size, len(head), crc32c(head))

    files = run_side_by_side(write, list(plan.own), PACKS_AT_ONCE)
    return plan, _reports(plan, files, leaves)


def _reports(
    plan: Plan, files: Sequence[FileReport], leaves: Sequence[LeafRecord]
) -> list[ItemReport]:
    """Returns a report as of one process that wrote all.

    One more follows for each further process that values were kept for.
    """
    values = [leaf for leaf in leaves if leaf.grid is None]
    first = [encode_value(leaf.value[0] if leaf.per_process else leaf.value) for leaf in values]
    kept = [leaf.value for leaf in values if leaf.per_process]
    others = [
        ItemReport(process, plan.hash, (), (), tuple(encode_value(each[process]) for each in kept))
        for process in range(1, max(map(len, kept), default=1))
    ]
    return [ItemReport(0, plan.hash, tuple(files), (), tuple(first)), *others]


def _in_order(item: ItemRecord) -> tuple[Any, list[str], list[LeafRecord]]:
    """Returns the tree's description, the leaves' paths here, and the leaves, in flatten order."""
    skeleton = rebuild(item.tree, list(range(len(item.leaves))))
    description, paths = describe(skeleton)
    order = flatten(skeleton)[0]
    # The item's own description names the types.
    tree = item.tree if order == sorted(order) else description
    return tree, paths, [item.leaves[index] for index in order]


def _leaf(leaf: LeafRecord, path: str) -> Leaf:
    if leaf.grid is None:
        return Leaf(path, leaf.kind, per_process=leaf.per_process)
    shards = tuple(
        size // shard if shard else 1
        for size, shard in zip(leaf.shape, leaf.grid.shard_shape, strict=True)
    )
    return Leaf(
        path,
        leaf.kind,
        leaf.dtype,
        leaf.shape,
        itemsize=leaf.numpy_dtype.itemsize,
        placement=_placement(shards),
        sharding=leaf.sharding,
        impl=leaf.impl,
        per_process=leaf.per_process,
        weak=leaf.weak,
    )


@lru_cache(maxsize=16)  # leaves with one placement share their grid
def _placement(shards: Shape) -> ShardPlacement | None:
    """Returns a placement by which one process holds all shards, so that chunks keep within them.

    Returns None for one shard.
    """
    count = math.prod(shards)
    if not 1 < count <= MAX_SHARDS:
        return None
    holders = np.zeros((count, 1), np.int64)
    return ShardPlacement(shards, holders, np.arange(count, dtype=np.int64)[:, None])


def _chunk_region(plan: Plan, chunk: Chunk, leaf: LeafRecord) -> Wanted:
    """Returns a chunk as a region of a stored leaf, and the region that has to be read for it."""
    assert leaf.grid is not None
    shard = _shard_of(plan, chunk)
    if chunk.inside is None:
        return Wanted(leaf, shard, shard)
    region = tuple(
        (first + cut.start, first + cut.stop)
        for (first, _), cut in zip(shard, chunk.inside, strict=True)
    )
    stored = leaf.grid.chunk_shape
    reads_little_more = math.prod(stored) * leaf.numpy_dtype.itemsize <= CHUNK_BYTES
    return Wanted(leaf, region, region if reads_little_more else _around(region, shard, stored))


def _shard_of(plan: Plan, chunk: Chunk) -> Region:
    array = plan.arrays[chunk.leaf]
    assert array is not None
    shards = replace(array.grid, chunk_shape=array.grid.shard_shape)
    return shards.region(max(chunk.slot, 0))


def _around(region: Region, shard: Region, chunk_shape: Shape) -> Region:
    """Returns the chunks around a region of one shard."""
    return tuple(
        (
            first + (start - first) // chunk * chunk,
            min(last, first + -(-(stop - first) // chunk) * chunk),
        )
        for (start, stop), (first, last), chunk in zip(region, shard, chunk_shape, strict=True)
    )


class _LazyChunk(NamedTuple):
    """A chunk that is read when its turn comes, in the pack's order."""

    arrays: Iterator[HostArray]

    def get(self) -> HostArray:
        """Returns the chunk's array, once."""
        return next(self.arrays)

"""Restores 1,000 leaves by 4,096 processes, without devices and disks: what one of them reads.

    python benchmarks/restore_scale.py

It tells what the primary sends, too. The plan, the record, the reader and the waves are the real
ones. The store is made of the plan: it gives the header of any pack, and zeros for its data, and
counts what is asked of it. The group counts the bytes of messages.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from crc32c import crc32c
from plan_scale import PROCESSES, make_job, timed

from holdfast.checkpoint.agreement.group_record import read_record_together
from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.format.pack_header import PREFIX_BYTES, ChunkChecksum, count_prefixes
from holdfast.checkpoint.format.record import Record, parse_record
from holdfast.checkpoint.memory.pool import MemoryPool
from holdfast.checkpoint.restoring.match import LeafRequest
from holdfast.checkpoint.restoring.reader import ItemReader, ReadRequest
from holdfast.checkpoint.restoring.waves import WAVE_BYTES, Placed, divide_into_waves
from holdfast.checkpoint.saving.pack_writer import PackPlan, lay_out_pack
from holdfast.checkpoint.saving.plan import Leaf, Plan, ShardPlacement, _own_chunks, make_plan
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record
from holdfast.checkpoint.storage.tombstone import RECORD_NAME

SAVE_ID = "9f3a61c2"


@functools.lru_cache(maxsize=64)
def checksum_of_zeros(nbytes: int) -> ChunkChecksum:
    crcs = [0]
    data = bytes(PREFIX_BYTES)
    for start in range(0, nbytes, PREFIX_BYTES):
        crcs.append(crc32c(data[: nbytes - start], crcs[-1]))
    return ChunkChecksum(crcs[-1], tuple(crcs[1 : 1 + count_prefixes(nbytes)]))


class PlannedStore:
    """A store that holds what a plan says, all zeros.

    It has of the Storage protocol what a restore asks for.
    """

    root = "planned"
    posix = None
    max_concurrency = 4

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._packs = dict[int, dict[int, PackPlan]]()
        self.bytes = self.reads = 0
        self.record = b""

    def pack(self, rank: int, pack: int) -> tuple[PackPlan, bytes]:
        """Returns a pack of any process, and its header."""
        if rank not in self._packs:
            own = _own_chunks(self._plan.arrays, rank)
            self._packs[rank] = {
                number: lay_out_pack(self._plan, chunks) for number, chunks in own.items()
            }
        planned = self._packs[rank][pack]
        return planned, planned.frame.join(
            [checksum_of_zeros(chunk.nbytes) for chunk in planned.chunks]
        )

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        assert name.endswith(RECORD_NAME)
        return self.record

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        rank, pack, _ = name.rpartition("/")[2].split("-")
        planned, header = self.pack(int(rank), int(pack))
        done = 0
        for buffer in buffers:
            nbytes = max(0, min(buffer.nbytes, planned.size - offset - done))
            data = header[offset + done : offset + done + nbytes]
            buffer[: len(data)] = data
            buffer[len(data) : nbytes] = bytes(nbytes - len(data))
            done += nbytes
        self.bytes = self.bytes + done
        self.reads = self.reads + 1
        return done


class CountingGroup:
    """The primary's side of a group: counts messages, and the bytes sent to all others."""

    index = 0
    count = PROCESSES

    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def broadcast(self, name: str, value: bytes | None, *, timeout_s: float) -> bytes:
        assert value is not None
        self.messages = self.messages + self.count - 1
        self.bytes = self.bytes + len(value) * (self.count - 1)
        return value


def save(plan: Plan) -> PlannedStore:
    """Returns a store that has a save of the plan.

    Headers whose size nobody asks for are taken to be as long as the longest of rank 0.
    """
    store = PlannedStore(plan)
    files: dict[int, list[FileReport]] = {rank: [] for rank in range(plan.process_count)}
    for rank, pack in plan.files:
        planned, header = store.pack(rank, pack)
        files[rank].append(
            FileReport(pack_name(rank, pack, SAVE_ID), planned.size, len(header), crc32c(header))
        )
    reports = [ItemReport(rank, plan.hash, tuple(found)) for rank, found in files.items()]
    facts: dict[str, Any] = {
        "writer": SAVE_ID,
        "processes": plan.process_count,
        "started_s": 0.0,
        "finished_s": 1.0,
    }
    store.record = timed(
        "record built", lambda: build_record(RecordHead(1, **facts), {"state": (plan, reports)})
    )
    return store


def regions_of(leaf: Leaf, rank: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns what a process holds of a leaf."""
    assert leaf.placement is not None
    counts = leaf.placement.shards_per_axis
    shard_shape = tuple(size // count for size, count in zip(leaf.shape, counts, strict=True))
    grid = Grid(leaf.shape, shard_shape, shard_shape)
    return [
        grid.region(int(shard))
        for shard in np.flatnonzero((leaf.placement.ranks == rank).any(axis=1))
    ]


def _placement(regions: list[Any]) -> Any:
    elements = sum(math.prod(stop - start for start, stop in region) for region in regions)
    return SimpleNamespace(regions=regions, num_elements=elements)


def restore(
    store: PlannedStore, record: Record, wanted: Sequence[tuple[Leaf, list[Any]]], label: str
) -> None:
    """Prints the waves in which one process reads its regions of all leaves, and the sums."""
    item = record.items["state"]
    saved = {leaf.path: leaf for leaf in item.leaves}
    placed: list[Any] = [
        Placed.of(LeafRequest(saved[leaf.path], "jax"), _placement(regions))
        for leaf, regions in wanted
    ]
    waves = list(divide_into_waves(placed, lambda: WAVE_BYTES // 2))
    whole = sum(request.leaf.nbytes for request, *_ in placed)
    before = math.ceil(whole / (WAVE_BYTES // 2))
    reader = ItemReader(store, "1", item)
    pool = MemoryPool()  # type: ignore[arg-type]
    store.bytes = store.reads = needed = 0
    began = time.perf_counter()
    for wave in waves:
        reads = [
            ReadRequest(request.leaf, region)
            for request, placement, *_ in wave
            for region in placement.regions
        ]
        reader.fill(reads, pool.take)
        needed += sum(read.nbytes for read in reads)
    print(
        f"{label}: {len(waves)} wave(s) of {needed / len(waves):,.0f} bytes (by the arrays' own"
        f" bytes at least {before} waves of {needed / before:,.0f}); reads {store.bytes:,} bytes in"
        f" {store.reads:,} calls for {needed:,} needed: {store.bytes / needed:.3f};"
        f" {time.perf_counter() - began:.2f} s"
    )


def many_processes() -> None:
    """4,096 processes restore what 4,096 saved, and what is laid out for 512."""
    me = 7
    plan = make_job(me)
    store = save(plan)
    group = CountingGroup()
    record = timed(
        "record read and sent",
        lambda: read_record_together(store, "1", group, "record", timeout_s=1).record,
    )  # type: ignore[arg-type]
    sent = group.bytes // group.messages
    print(
        f"record: {len(store.record):,} bytes, {sent:,} as a message; the primary sends"
        f" {group.messages:,} of them: {group.bytes:,} bytes"
    )
    restore(
        store,
        record,
        [(leaf, regions_of(leaf, me)) for leaf in plan.leaves],
        f"1 of {PROCESSES:,} processes, same layout",
    )


def many_of_few() -> None:
    """512 processes restore what 8 saved: a 64th of each chunk is for one of them."""
    rows = 8 * 64
    columns = 56_640  # chunks of 58 MB
    placement = ShardPlacement((8, 1), np.arange(8)[:, None], np.arange(8)[:, None])
    shape = (rows, 2 * columns * 4)
    leaves = [
        Leaf(f"layer{i}.w", "array", "bfloat16", shape, itemsize=2, placement=placement)
        for i in range(4)
    ]
    tree = {
        "kind": "dict",
        "keys": [leaf.path for leaf in leaves],
        "nodes": list(range(len(leaves))),
    }
    store = save(make_plan(tree, leaves, 0, 8))
    record = parse_record(store.record, RECORD_NAME)
    for rank in (0, 200):
        share = rows // 512
        wanted = [
            (leaf, [((rank * share, (rank + 1) * share), (0, leaf.shape[1]))]) for leaf in leaves
        ]
        restore(
            store,
            record,
            wanted,
            f"process {rank} of 512, from 8 shards in chunks of {store_chunk(record):,} bytes",
        )


def store_chunk(record: Record) -> int:
    """Returns the bytes of the largest chunk of a record."""
    return max(
        itertools.chain(
            *(
                leaf.grid.sizes.tolist()
                for leaf in record.items["state"].leaves
                if leaf.grid is not None
            )
        )
    )


if __name__ == "__main__":
    many_processes()
    many_of_few()

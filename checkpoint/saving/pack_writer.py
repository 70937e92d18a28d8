"""Writes packs: which chunk lies where in one, and its bytes as a stream of checksummed pieces. A pack is an ordinary safetensors file.

The chunks lie in the plan's order, back to back. The header is padded so that the data begins at a multiple of 64 bytes, and all of it
but the checksums is known from the plan. Packs of a process are written side by side; JSON items are written here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from crc32c import crc32c

from ..format.dtypes import dtype_named, stored_as
from ..format.files import FileReport, ItemReport, encode_value, json_name, pack_name
from ..format.grid import Chunk
from ..format.pack_header import header_around, join_header
from ..storage.base import Part, Storage, count_parts, run_side_by_side
from ..storage.path import join
from .plan import Plan, local_chunks
from .snapshot import Snapshot


def write_snapshot(
    snapshot: Snapshot, storage: Storage, step_dir: str, item: str, save_id: str, *, progress: Callable[[int], None] | None = None
) -> ItemReport:
    """Writes the packs of this process under `<step_dir>/<item>/`, durably, and reports them; blocks, and empties the snapshot.

    `step_dir` is relative to the store's root ("" for the root itself). `progress` is called, from several threads, with the bytes that
    went out. A failure is the store's OSError (or the device's error); the caller turns it into SaveFailed and reports it to the group.
    """
    plan = snapshot.plan
    crcs: dict[tuple[int, str], int] = {}

    def write(pack: int) -> FileReport:
        planned, found = plan_pack(plan, pack), list[int]()
        shards = snapshot.take_pack(pack)
        name = pack_name(plan.process, pack, save_id)
        parts = pack_parts(planned, shards, found)
        storage.write(join(step_dir, item, name), planned.size, parts if progress is None else count_parts(parts, progress))
        if plan.process == 0:
            crcs.update({(chunk.leaf, chunk.name): crc for chunk, crc in zip(planned.chunks, found, strict=True) if chunk.slot < 0})
        return FileReport(name, planned.size, planned.head_bytes, crc32c(planned.header(found)))

    try:
        files = run_side_by_side(write, list(plan.own), storage.max_concurrency)
        local = _local_crcs(snapshot, crcs)
    finally:
        snapshot.release()
    own = zip(snapshot.values, plan.value_leaves, strict=True)
    values = tuple(encode_value(value) for value, leaf in own if plan.process == 0 or leaf.per_process)
    return ItemReport(plan.process, plan.hash, tuple(files), local, values)


def _local_crcs(snapshot: Snapshot, written: dict[tuple[int, str], int]) -> tuple[int, ...]:
    """Returns one CRC for each host-local array, then for each value (0: kept per process): the same on every process if they agree."""
    plan = snapshot.plan
    if plan.process_count == 1:
        return ()
    crcs = []
    for position, leaf in enumerate(plan.local_leaves):
        crc = 0
        for chunk in local_chunks(plan, leaf):
            found = written[leaf, chunk.name] if plan.process == 0 else crc32c(chunk_bytes(snapshot.local[position], chunk))
            crc = crc32c(found.to_bytes(4, "little"), crc)
        crcs.append(crc)
    values = zip(snapshot.values, plan.value_leaves, strict=True)
    return (*crcs, *(0 if leaf.per_process else crc32c(repr(encode_value(value)).encode()) for value, leaf in values))


def write_json(storage: Storage, step_dir: str, item: str, save_id: str, process: int, data: bytes) -> ItemReport:
    """Writes JSON as `<item>/<process>-j-<save id>.json`, durably, and reports it."""
    name = json_name(process, save_id)
    storage.write(join(step_dir, item, name), len(data), [(0, [memoryview(data)])])
    return replace(report_json(process, data), files=(FileReport(name, len(data), 0, crc32c(data)),))


def report_json(process: int, data: bytes) -> ItemReport:
    """Reports JSON that another process writes: by its CRC the processes' values are compared."""
    return ItemReport(process, "", (), (crc32c(data),))


PIECE_BYTES = 1 << 20  # checksummed and written while it is in the cache

BATCH_BUFFERS = 1000


@dataclass(frozen=True)
class PackPlan:
    """A pack before it is written: `head` and `tail` are the header around the checksums, `size` the whole file's bytes."""

    chunks: tuple[Chunk, ...]
    head: bytes
    tail: bytes
    size: int

    @property
    def head_bytes(self) -> int:
        return len(self.head) + 8 * len(self.chunks) + len(self.tail)

    def header(self, crcs: Sequence[int]) -> bytes:
        return join_header(self.head, crcs, self.tail)


def plan_pack(plan: Plan, pack: int) -> PackPlan:
    """Returns one of this process's packs, made once a plan."""
    key = f"pack {pack}"
    if key not in plan.cache:
        plan.cache[key] = _plan_pack(plan, plan.own[pack])
    found: PackPlan = plan.cache[key]
    return found


def _plan_pack(plan: Plan, chunks: tuple[Chunk, ...]) -> PackPlan:
    entries = []
    for chunk in chunks:
        dtype = dtype_named(plan.leaves[chunk.leaf].dtype)
        assert dtype is not None
        entries.append((chunk.name, *stored_as(dtype, chunk.shape), chunk.nbytes))
    head, tail = header_around(entries)
    return PackPlan(chunks, head, tail, len(head) + 8 * len(chunks) + len(tail) + sum(chunk.nbytes for chunk in chunks))


def pack_parts(pack: PackPlan, shards: list[Any], crcs: list[int]) -> Iterator[Part]:
    """Yields the file's parts, each checksummed just before; appends the chunks' CRCs to `crcs`; the header comes last.

    A chunk's shard is dropped from `shards` once it is written.
    """
    offset, batch, held = pack.head_bytes, [], 0
    for index, chunk in enumerate(pack.chunks):
        data = chunk_bytes(shards[index], chunk)
        shards[index] = None
        if data.nbytes < PIECE_BYTES:
            crcs.append(crc32c(data))
            batch.append(data)
            held += data.nbytes
            if held < PIECE_BYTES and len(batch) < BATCH_BUFFERS:
                continue
        if batch:
            yield offset, batch
            offset, batch, held = offset + held, [], 0
        if data.nbytes >= PIECE_BYTES:
            crc = 0
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                crc = crc32c(piece, crc)
                yield offset + start, [piece]
            crcs.append(crc)
            offset += data.nbytes
    if batch:
        yield offset, batch
    yield 0, [memoryview(pack.header(crcs))]


def chunk_bytes(shard: Any, chunk: Chunk) -> memoryview:
    """Returns the bytes of a chunk of a numpy array or Shard, in C order; a view unless the array is laid out otherwise."""
    array: Any = shard if isinstance(shard, np.ndarray) else shard.get()
    region: Any = array if chunk.inside is None else array[chunk.inside]
    data: Any = np.ascontiguousarray(region).reshape(-1).view(np.uint8)
    return memoryview(data)

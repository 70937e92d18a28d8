"""Writes snapshots as packs, side by side, and JSON items."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from crc32c import crc32c

from ._pack import chunk_bytes, pack_parts, plan_pack
from ._plan import local_chunks
from ._reports import FileReport, ItemReport, encode_value, json_name, pack_name
from ._snapshot import Snapshot, local_leaves
from ._storage import Storage, counted


def write_snapshot(
    snapshot: Snapshot, storage: Storage, step_dir: str, item: str, writer_id: str, *, progress: Callable[[int], None] | None = None
) -> ItemReport:
    """Writes the packs of this process under `<step_dir>/<item>/`, durably, and reports them; blocks, and empties the snapshot.

    `step_dir` is relative to the store's root ("" for the root itself). `progress` hears, from several threads, how many more bytes went
    out. A failure is the store's OSError (or the device's error); the caller turns it into SaveFailed and reports it to the group.
    """
    plan = snapshot.plan
    crcs: dict[tuple[int, str], int] = {}

    def write(pack: int) -> FileReport:
        planned, found = plan_pack(plan, pack), list[int]()
        shards = snapshot.take_pack(pack)
        name = pack_name(plan.process, pack, writer_id)
        parts = pack_parts(planned, shards, found)
        storage.write(join(step_dir, item, name), planned.size, parts if progress is None else counted(parts, progress))
        if plan.process == 0:
            crcs.update({(chunk.leaf, chunk.name): crc for chunk, crc in zip(planned.chunks, found, strict=True) if chunk.slot < 0})
        return FileReport(name, planned.size, planned.head_bytes, crc32c(planned.header(found)))

    try:
        files = run_side_by_side(write, list(plan.own), storage.lanes)
        local = _local_crcs(snapshot, crcs)
    finally:
        snapshot.release()
    own = zip(snapshot.values, (leaf for leaf in plan.leaves if leaf.is_value), strict=True)
    values = tuple(encode_value(value) for value, leaf in own if plan.process == 0 or leaf.per_process)
    return ItemReport(plan.process, plan.hash, tuple(files), local, values)


def run_side_by_side(work: Callable[[Any], Any], items: list[Any], lanes: int) -> list[Any]:
    """Does `work` on each item, on up to `lanes` threads that end with the call; the first error is raised, after all have ended."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(lanes, len(items)), thread_name_prefix="holdfast-io") as pool:
        return list(pool.map(work, items))


def _local_crcs(snapshot: Snapshot, written: dict[tuple[int, str], int]) -> tuple[int, ...]:
    """Returns one CRC for each host-local array, then for each value (0: kept per process): the same on every process if they agree."""
    plan = snapshot.plan
    if plan.process_count == 1:
        return ()
    crcs = []
    for position, leaf in enumerate(local_leaves(plan)):
        crc = 0
        for chunk in local_chunks(plan, leaf):
            found = written[leaf, chunk.name] if plan.process == 0 else crc32c(chunk_bytes(snapshot.local[position], chunk))
            crc = crc32c(found.to_bytes(4, "little"), crc)
        crcs.append(crc)
    values = zip(snapshot.values, (leaf for leaf in plan.leaves if leaf.is_value), strict=True)
    return (*crcs, *(0 if leaf.per_process else crc32c(repr(encode_value(value)).encode()) for value, leaf in values))


def write_json(storage: Storage, step_dir: str, item: str, writer_id: str, process: int, value: Any) -> ItemReport:
    """Writes a value of JSON types as `<item>/<process>-j-<writer id>.json`, durably, and reports it."""
    data = json.dumps(value, separators=(",", ":")).encode()
    name = json_name(process, writer_id)
    storage.write(join(step_dir, item, name), len(data), [(0, [memoryview(data)])])
    return ItemReport(process, "", (FileReport(name, len(data), 0, crc32c(data)),))


def join(*parts: str) -> str:
    """Returns a store's name of its parts; empty ones are left out."""
    return "/".join(part for part in parts if part)


__all__ = ["join", "run_side_by_side", "write_json", "write_snapshot"]

"""Writes packs: which chunk lies where in one, and its bytes as a stream of checksummed pieces. A
pack is an ordinary safetensors file.

The chunks lie in the plan's order, back to back. The header is padded so that the data begins at a
multiple of 64 bytes, and all of it but the checksums is known from the plan. Packs of a process are
written side by side; JSON items are written here too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from crc32c import crc32c

from ..format.dtypes import dtype_named, stored_as
from ..format.grid import Chunk
from ..format.item_report import FileReport, ItemReport, bin_name, json_name, pack_name
from ..format.own_files import StagedFiles
from ..format.pack_header import (
    LARGE_BYTES,
    PREFIX_BYTES,
    ChunkChecksum,
    HeaderFrame,
    count_prefixes,
)
from ..format.record import chunk_runs
from ..format.values import encode_value
from ..options import Statistics
from ..storage.base import Part, Storage
from ..storage.counting import count_parts
from ..storage.path import join
from ..storage.threads import run_side_by_side
from .incremental import (
    MAX_LINKS,
    NAMES,
    ChunkDigest,
    PackHistory,
    RunningDigest,
    SaveHistory,
    WrittenFile,
    choose_links,
    digest_chunk,
    link_name,
)
from .plan import Plan, local_chunks
from .snapshot import Snapshot

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenPack:
    """What became of one planned pack: its files, which of them has each chunk, and the chunks'
    CRCs; `linked` are bytes of old files.
    """

    files: tuple[WrittenFile, ...]
    where: tuple[int, ...]
    crcs: tuple[int, ...]
    digests: tuple[ChunkDigest, ...] = ()
    linked_bytes: int = 0
    written_bytes: int = 0


class PackTarget(NamedTuple):
    """Where the packs of one item go, and who hears of the bytes."""

    storage: Storage
    folder: str
    save_id: str
    progress: Callable[[int], None] | None

    def write(
        self,
        plan: Plan,
        number: int,
        planned: PackPlan,
        shards: list[Any],
        digests: list[ChunkDigest] | None = None,
    ) -> tuple[WrittenFile, list[int]]:
        """Writes chunks as pack `number`, durably; returns the file, and the CRC of each chunk;
        appends their digests.
        """
        found, name = list[ChunkChecksum](), pack_name(plan.process, number, self.save_id)
        parts = pack_parts(planned, shards, found, digests)
        path = join(self.folder, name)
        self.storage.write(
            path,
            planned.size,
            parts if self.progress is None else count_parts(parts, self.progress),
        )
        report = FileReport(
            name, planned.size, planned.frame.nbytes, crc32c(planned.frame.join(found))
        )
        return WrittenFile(path, report, planned.size - planned.frame.nbytes), [
            each.crc for each in found
        ]

    def link(self, known: WrittenFile, name: str) -> bool:
        """Gives a file of the last save a second name; says whether it could."""
        assert self.storage.posix is not None
        try:
            self.storage.posix.link(known.name, join(self.folder, name), known.report.size)
        except OSError as error:
            _log.debug(
                "%s/%s is written anew, since %s cannot be linked: %s",
                self.folder,
                name,
                known.name,
                error,
            )
            return False
        return True


def write_snapshot(
    snapshot: Snapshot,
    storage: Storage,
    step_dir: str,
    item: str,
    save_id: str,
    *,
    progress: Callable[[int], None] | None = None,
    history: SaveHistory | None = None,
    statistics: Statistics | None = None,
) -> ItemReport:
    """Writes the packs of this process under `<step_dir>/<item>/`, durably, and reports them;
    blocks, and empties the snapshot.

    `step_dir` is relative to the store's root ("" for the root itself). `progress` is called, from
    several threads, with the bytes that went out. With a `history` files of the last save are
    linked for what has not changed. A failure is the store's OSError (or the device's error); the
    caller turns it into SaveFailed and reports it to the group.
    """
    plan, target = snapshot.plan, PackTarget(storage, join(step_dir, item), save_id, progress)
    previous = {} if history is None else history.of(item, plan)

    def write(pack: int) -> WrittenPack:
        planned, shards = plan_pack(plan, pack), snapshot.take_pack(pack)
        if history is not None:
            return _write_changed(
                plan,
                pack,
                planned,
                shards,
                previous.get(pack),
                snapshot.unmoved.files.get(pack, set()),
                target,
            )
        file, crcs = target.write(plan, pack, planned, shards)
        return WrittenPack((file,), (0,) * len(crcs), tuple(crcs), written_bytes=file.report.size)

    try:
        packs = dict(
            zip(
                plan.own,
                run_side_by_side(write, list(plan.own), storage.max_concurrency),
                strict=True,
            )
        )
        linked_bytes = sum(pack.linked_bytes for pack in packs.values())
        if linked_bytes and storage.posix is not None:
            storage.posix.make_durable(target.folder)
        crcs = {
            (chunk.leaf, chunk.name): crc
            for pack, chunks in plan.own.items()
            for chunk, crc in zip(chunks, packs[pack].crcs, strict=True)
            if chunk.slot < 0
        }
        local = _local_crcs(snapshot, crcs)
    finally:
        snapshot.release()
    if statistics is not None:
        statistics.add(
            save_written_bytes=sum(pack.written_bytes for pack in packs.values()),
            save_linked_bytes=linked_bytes,
        )
    if history is not None:
        known = {
            pack: PackHistory(found.files, found.where, found.digests, found.crcs)
            for pack, found in packs.items()
        }
        history.begin(item, plan, known, snapshot.unmoved.arrays, linked=linked_bytes > 0)
    own = zip(snapshot.values, plan.value_leaves, strict=True)
    values = tuple(
        encode_value(value) for value, leaf in own if plan.process == 0 or leaf.per_process
    )
    files = tuple(file.report for pack in packs.values() for file in pack.files)
    return ItemReport(
        plan.process,
        plan.hash,
        files,
        local,
        values,
        None if history is None else _runs(list(packs.values())),
    )


def _runs(packs: Sequence[WrittenPack]) -> tuple[tuple[int, int, int], ...]:
    """Returns which of the process's files has each of its chunks, in the plan's order, as runs."""
    first, where = 0, [np.zeros(0, np.int64)]
    for pack in packs:
        where.append(first + np.array(pack.where, np.int64))
        first += len(pack.files)
    return tuple((at, step, count) for at, step, count in chunk_runs(np.concatenate(where)))


def _write_changed(
    plan: Plan,
    pack: int,
    planned: PackPlan,
    shards: list[Any],
    old: PackHistory | None,
    linked: set[int],
    target: PackTarget,
) -> WrittenPack:
    """Links the files of the last save that are worth it, and writes all other chunks as one more
    pack.

    `linked` are those that have been linked already: their shards are None. Links come first, while
    the bytes are held: what cannot be linked (deleted meanwhile, too many links, another project)
    is written.
    """
    old = old or PackHistory((), (), (), ())
    sizes = [chunk.nbytes for chunk in planned.chunks]
    known_digests = old.digests if old.files else (None,) * len(sizes)
    digests = [
        known if known is None or shard is None else digest_chunk(chunk_bytes(shard, chunk), known)
        for shard, chunk, known in zip(shards, planned.chunks, known_digests, strict=True)
    ]
    unchanged = [
        found is not None and found == known
        for found, known in zip(digests, known_digests, strict=True)
    ]
    files, where, crcs = list[WrittenFile](), [-1] * len(digests), [0] * len(digests)
    worth = choose_links(old, unchanged, sizes)[: MAX_LINKS - len(linked)] if old.files else []
    for file in sorted({*linked, *worth}):
        known, name = old.files[file], link_name(plan, pack, file, target.save_id)
        if file not in linked and not target.link(known, name):
            continue
        for index in [
            index for index, same in enumerate(unchanged) if same and old.where[index] == file
        ]:
            where[index], crcs[index], shards[index] = len(files), old.crcs[index], None
        files.append(
            replace(known, name=join(target.folder, name), report=replace(known.report, name=name))
        )
    changed, written_bytes = [index for index, file in enumerate(where) if file < 0], 0
    linked_bytes = sum(sizes) - sum(sizes[index] for index in changed)
    if target.progress is not None and linked_bytes:
        target.progress(linked_bytes)
    if changed:
        some = (
            planned
            if not files
            else _plan_pack(plan, tuple(planned.chunks[index] for index in changed))
        )
        made = list[ChunkDigest]()
        written, found = target.write(
            plan, pack * NAMES + len(old.files), some, [shards[index] for index in changed], made
        )
        for index, crc, digest in zip(changed, found, made, strict=True):
            where[index], crcs[index], digests[index], shards[index] = len(files), crc, digest, None
        files.append(written)
        written_bytes = written.report.size
    whole = tuple(digest for digest in digests if digest is not None)  # each is, by now
    return WrittenPack(tuple(files), tuple(where), tuple(crcs), whole, linked_bytes, written_bytes)


def _local_crcs(snapshot: Snapshot, written: dict[tuple[int, str], int]) -> tuple[int, ...]:
    """Returns one CRC for each host-local array, then for each value (0: kept per process): the
    same on every process if they agree.
    """
    plan = snapshot.plan
    if plan.process_count == 1:
        return ()
    crcs = []
    for position, leaf in enumerate(plan.local_leaves):
        crc = 0
        for chunk in local_chunks(plan, leaf):
            found = (
                written[leaf, chunk.name]
                if plan.process == 0
                else crc32c(chunk_bytes(snapshot.local[position], chunk))
            )
            crc = crc32c(found.to_bytes(4, "little"), crc)
        crcs.append(crc)
    values = zip(snapshot.values, plan.value_leaves, strict=True)
    return (
        *crcs,
        *(
            0 if leaf.per_process else crc32c(repr(encode_value(value)).encode())
            for value, leaf in values
        ),
    )


def write_json(
    storage: Storage, step_dir: str, item: str, save_id: str, process: int, data: bytes
) -> ItemReport:
    """Writes JSON as `<item>/<process>-j-<save id>.json`, durably, and reports it."""
    name = json_name(process, save_id)
    storage.write(join(step_dir, item, name), len(data), [(0, [memoryview(data)])])
    return replace(
        report_json(process, data), files=(FileReport(name, len(data), 0, crc32c(data)),)
    )


def report_json(process: int, data: bytes) -> ItemReport:
    """Reports JSON that another process writes: by its CRC the processes' values are compared."""
    return ItemReport(process, "", (), (crc32c(data),))


def write_files(
    storage: Storage,
    step_dir: str,
    item: str,
    save_id: str,
    process: int,
    staged: StagedFiles,
    progress: Callable[[int], None],
) -> ItemReport:
    """Writes files from a scratch folder as `<item>/<process>-<number>-<save id>.bin`, durably, and
    reports them with their own names.
    """

    def write(numbered: tuple[int, str]) -> FileReport:
        number, own = numbered
        name, crcs = bin_name(process, number, save_id), [0]
        with open(staged.folder / own, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            storage.write(
                join(step_dir, item, name), size, count_parts(_file_parts(file, crcs), progress)
            )
        return FileReport(name, size, 0, crcs[0])

    reports = run_side_by_side(write, list(enumerate(staged.names)), storage.max_concurrency)
    prefix = f"{process:05d}/" if staged.per_process else ""
    return ItemReport(
        process,
        "",
        tuple(reports),
        names=tuple(f"{prefix}{own}" for own in staged.names),
        per_process=staged.per_process,
    )


def _file_parts(file: BinaryIO, crcs: list[int]) -> Iterator[Part]:
    """Yields a file's parts; `crcs` has the checksum of those that were."""
    offset = 0
    while data := file.read(PIECE_BYTES):
        crcs[0] = crc32c(data, crcs[0])
        yield offset, [memoryview(data)]
        offset += len(data)


PIECE_BYTES = 4 * PREFIX_BYTES  # checksummed and written while it is in the cache

BATCH_BUFFERS = 1000


@dataclass(frozen=True)
class PackPlan:
    """A pack before it is written: `size` is the whole file's, in bytes."""

    chunks: tuple[Chunk, ...]
    frame: HeaderFrame
    size: int


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
    frame = HeaderFrame.around(entries)
    return PackPlan(chunks, frame, frame.nbytes + sum(chunk.nbytes for chunk in chunks))


def pack_parts(
    pack: PackPlan,
    shards: list[Any],
    checksums: list[ChunkChecksum],
    digests: list[ChunkDigest] | None = None,
) -> Iterator[Part]:
    """Yields the file's parts, each checksummed just before; appends those of the chunks to
    `checksums`; the header comes last.

    A chunk's shard is dropped from `shards` once it is written. Where `digests` are wanted, they
    are appended too.
    """
    offset = pack.frame.nbytes
    batch = []
    held = 0
    for index, chunk in enumerate(pack.chunks):
        data = chunk_bytes(shards[index], chunk)
        shards[index] = None
        digesting = None if digests is None else RunningDigest()
        if data.nbytes < LARGE_BYTES:
            checksums.append(ChunkChecksum(crc32c(data)))
            if digests is not None and digesting is not None:
                digesting.add(data)
                digests.append(digesting.result())
            batch.append(data)
            held += data.nbytes
            if held < PIECE_BYTES and len(batch) < BATCH_BUFFERS:
                continue
        if batch:
            yield offset, batch
            offset = offset + held
            batch = []
            held = 0
        if data.nbytes >= LARGE_BYTES:
            crcs = [0]
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                for begin in range(0, piece.nbytes, PREFIX_BYTES):
                    crcs.append(crc32c(piece[begin : begin + PREFIX_BYTES], crcs[-1]))
                if digesting is not None:
                    digesting.add(piece)
                yield offset + start, [piece]
            if digests is not None and digesting is not None:
                digests.append(digesting.result())
            checksums.append(
                ChunkChecksum(crcs[-1], tuple(crcs[1 : 1 + count_prefixes(data.nbytes)]))
            )
            offset += data.nbytes
    if batch:
        yield offset, batch
    yield 0, [memoryview(pack.frame.join(checksums))]


def chunk_bytes(shard: Any, chunk: Chunk) -> memoryview:
    """Returns the bytes of a chunk of a numpy array or Shard, in C order; a view unless the array
    is laid out otherwise.
    """
    array: Any = shard if isinstance(shard, np.ndarray) else shard.get()
    region: Any = array if chunk.inside is None else array[chunk.inside]
    data: Any = np.ascontiguousarray(region).reshape(-1).view(np.uint8)
    return memoryview(data)

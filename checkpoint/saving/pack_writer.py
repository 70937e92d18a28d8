"""Writes packs: which chunk lies where in one, and its bytes as a stream of checksummed pieces.

A pack is an ordinary safetensors file. The chunks lie in the plan's order, back to back. The header
is padded so that the data begins at a multiple of 64 bytes, and all of it but the checksums is
known from the plan. Packs of a process are written side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from crc32c import crc32c

from ..arrays.dtypes import dtype_named, stored_as
from ..format.grid import Chunk
from ..format.item_report import FileReport, ItemReport, Run, pack_name
from ..format.pack_header import (
    LARGE_BYTES,
    ChunkChecksum,
    HeaderFrame,
    RunningChecksum,
)
from ..format.record import chunk_runs
from ..format.values import encode_value
from ..options import Statistics
from ..storage.base import Part
from ..storage.counting import count_parts
from ..storage.threads import run_side_by_side
from .incremental import (
    MAX_LINKS,
    NAMES,
    ChunkFate,
    RunningDigest,
    SaveHistory,
    WrittenFile,
    WrittenPack,
    choose_links,
    is_unchanged,
    link_file,
    link_name,
)
from .item_files import PIECE_BYTES, ItemTarget, Progress
from .plan import Plan, local_chunks
from .snapshot import Snapshot

BATCH_BUFFERS = 1000
# To let go of a buffer costs a thread of the client its own turn in Python.
SENT_BYTES = 16 * PIECE_BYTES  # of a chunk, handed at once to a store that streams
_NONE: Mapping[int, ChunkChecksum] = MappingProxyType({})


def write_snapshot(
    snapshot: Snapshot,
    target: ItemTarget,
    *,
    progress: Progress = lambda nbytes: None,
    history: SaveHistory | None = None,
    statistics: Statistics | None = None,
) -> ItemReport:
    """Writes the packs of this process, durably, and reports them. Blocks.

    The snapshot is empty then. `progress` is called, from several threads, with the bytes that went
    out. With a `history` files of the last save are linked for what has not changed. A failure is
    the store's OSError (or the device's error); the caller turns it into SaveFailed and reports it
    to the group.
    """
    plan = snapshot.plan
    storage = target.storage
    writer = _PackWriter(snapshot, target, progress, history)
    try:
        written = run_side_by_side(writer.write, list(plan.own), storage.max_concurrency)
        packs = dict(zip(plan.own, written, strict=True))
        linked_bytes = sum(pack.linked_bytes for pack in written)
        if linked_bytes and storage.posix is not None:
            storage.posix.make_durable(target.folder)
        local = () if plan.process_count == 1 else _crcs_to_compare(snapshot, packs)
    finally:
        snapshot.release()
    if statistics is not None:
        written_bytes = sum(pack.written_bytes for pack in written)
        statistics.add(save_written_bytes=written_bytes, save_linked_bytes=linked_bytes)
    if history is not None:
        history.begin(target.item, plan, packs, snapshot.unmoved.arrays, linked=linked_bytes > 0)
    return ItemReport(
        plan.process,
        plan.hash,
        tuple(file.report for pack in written for file in pack.files),
        local,
        values=_values(snapshot),
        where=None if history is None else _runs(written),
    )


def _values(snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
    """Returns the Python values that this process reports: all at the primary, else its own."""
    plan = snapshot.plan
    values = zip(snapshot.values, plan.value_leaves, strict=True)
    return tuple(
        encode_value(value) for value, leaf in values if plan.process == 0 or leaf.per_process
    )


def _runs(packs: Sequence[WrittenPack]) -> tuple[Run, ...]:
    """Returns which of the process's files has each of its chunks, in the plan's order, as runs."""
    first = 0
    where = [np.zeros(0, np.int64)]
    for pack in packs:
        where.append(first + np.array([fate.file for fate in pack.chunks], np.int64))
        first += len(pack.files)
    return tuple((at, step, count) for at, step, count in chunk_runs(np.concatenate(where)))


class _PackWriter:
    """Writes the packs of one snapshot. Thread-safe, each pack once."""

    def __init__(
        self,
        snapshot: Snapshot,
        target: ItemTarget,
        progress: Progress,
        history: SaveHistory | None,
    ) -> None:
        self._snapshot = snapshot
        self._plan = snapshot.plan
        self._target = target
        self._progress = progress
        self._is_incremental = history is not None
        self._old = {} if history is None else history.of(target.item, snapshot.plan).packs

    def write(self, pack: int) -> WrittenPack:
        """Writes a pack, or what has changed of it since the last save."""
        try:
            return self._write(pack)
        finally:
            self._snapshot.written_in_place(pack)

    def _write(self, pack: int) -> WrittenPack:
        planned = plan_pack(self._plan, pack)
        shards = self._snapshot.take_pack(pack)
        old = self._old.get(pack)
        if old is None:
            return self._write_new(pack, planned, shards)
        return self._write_changed(pack, planned, shards, old)

    def _write_new(
        self, pack: int, planned: PackPlan, shards: list[Any], age: int = 0
    ) -> WrittenPack:
        """Writes chunks of a pack as one new file, durably; `age` is its number in the history."""
        number = pack * NAMES + age if self._is_incremental else pack
        name = pack_name(self._plan.process, number, self._target.save_id)
        # Those of a copy are by the places of all chunks: a later file of a pack has some alone.
        known = {} if self._is_incremental else self._snapshot.checksums_of(pack)
        sums = ChunkSums(known, with_digests=self._is_incremental)
        if self._target.storage.posix is None:
            parts = _head_first(pack_parts(planned, shards, sums, SENT_BYTES))
        else:
            parts = pack_parts(planned, shards, sums)
            if not self._is_incremental:
                parts = self._note_in_place(pack, planned, parts)
        self._target.write(name, planned.size, count_parts(parts, self._progress))
        head = planned.frame.join(sums.checksums)
        report = FileReport(name, planned.size, len(head), crc32c(head))
        file = WrittenFile(self._target.path(name), report, planned.size - len(head))
        return WrittenPack((file,), tuple(sums.fates), written_bytes=planned.size)

    def _note_in_place(self, pack: int, planned: PackPlan, parts: Iterator[Part]) -> Iterator[Part]:
        """Passes a pack's parts on; notes when the chunks that lie in the caller's arrays are out.

        A store asks for a part when the one before is written.
        """
        first = planned.chunks[: self._snapshot.count_in_place(pack)]
        end = planned.frame.nbytes + sum(chunk.nbytes for chunk in first)
        for offset, buffers in parts:
            if first and (offset >= end or offset == 0):  # the header comes last
                self._snapshot.written_in_place(pack)
                first = ()
            yield offset, buffers

    def _write_changed(
        self, pack: int, planned: PackPlan, shards: list[Any], old: WrittenPack
    ) -> WrittenPack:
        """Links the files of the last save that are worth it, and writes all other chunks."""
        unchanged = [
            # A shard that is None is of a leaf that is the same array: its chunk has been linked.
            shard is None
            or (fate.digest is not None and is_unchanged(chunk_bytes(shard, chunk), fate.digest))
            for shard, chunk, fate in zip(shards, planned.chunks, old.chunks, strict=True)
        ]
        # Links come first, while the bytes are held: what cannot be linked is written.
        linked = self._link_old(pack, planned, old, unchanged)
        is_changed = [
            not same or fate.file not in linked
            for same, fate in zip(unchanged, old.chunks, strict=True)
        ]
        changed = list(itertools.compress(planned.chunks, is_changed))
        linked_bytes = sum(chunk.nbytes for chunk in planned.chunks)
        linked_bytes -= sum(chunk.nbytes for chunk in changed)
        if linked_bytes:
            self._progress(linked_bytes)
        new = WrittenPack((), ())
        if changed:
            rest = list(itertools.compress(shards, is_changed))
            shards.clear()  # each is dropped once it is written
            if linked:
                planned = lay_out_pack(self._plan, changed)
            new = self._write_new(pack, planned, rest, len(old.files))
        return _join(old, linked, is_changed, replace(new, linked_bytes=linked_bytes))

    def _link_old(
        self, pack: int, planned: PackPlan, old: WrittenPack, unchanged: Sequence[bool]
    ) -> dict[int, WrittenFile]:
        """Returns the files that got a second name, by their numbers, from oldest to newest."""
        linked = self._snapshot.unmoved.files.get(pack, set())
        worth = choose_links(old, unchanged, [chunk.nbytes for chunk in planned.chunks])
        files = {}
        for number in sorted(linked.union(worth[: MAX_LINKS - len(linked)])):
            known = old.files[number]
            name = link_name(self._plan, pack, number, self._target.save_id)
            if number in linked or link_file(self._target, known, name):
                report = replace(known.report, name=name)
                files[number] = replace(known, name=self._target.path(name), report=report)
        return files


def _join(
    old: WrittenPack,
    linked: Mapping[int, WrittenFile],
    is_changed: Sequence[bool],
    new: WrittenPack,
) -> WrittenPack:
    """Returns the pack of the files that were linked and the new one."""
    places = {number: place for place, number in enumerate(linked)}
    written = iter(new.chunks)
    fates = []
    for changed, fate in zip(is_changed, old.chunks, strict=True):
        place = len(linked) if changed else places[fate.file]
        found = next(written) if changed else fate
        fates.append(ChunkFate(place, found.crc, found.digest))
    return replace(new, files=(*linked.values(), *new.files), chunks=tuple(fates))


def _crcs_to_compare(snapshot: Snapshot, packs: dict[int, WrittenPack]) -> tuple[int, ...]:
    """Returns one CRC for each host-local array, then for each value (0: kept per process).

    They are the same on every process if the processes agree.
    """
    return (*_local_crcs(snapshot, packs), *_value_crcs(snapshot))


def _local_crcs(snapshot: Snapshot, packs: dict[int, WrittenPack]) -> list[int]:
    plan = snapshot.plan
    written = _host_crcs(plan, packs)
    crcs = []
    for position, leaf in enumerate(plan.local_leaves):
        crc = 0
        for chunk in local_chunks(plan, leaf):
            if plan.process == 0:
                chunk_crc = written[leaf, chunk.name]
            else:
                chunk_crc = crc32c(chunk_bytes(snapshot.local[position], chunk))
            crc = crc32c(chunk_crc.to_bytes(4, "little"), crc)
        crcs.append(crc)
    return crcs


def _value_crcs(snapshot: Snapshot) -> Iterator[int]:
    for value, described in zip(snapshot.values, snapshot.plan.value_leaves, strict=True):
        text = repr(encode_value(value)).encode()
        yield 0 if described.per_process else crc32c(text)


def _host_crcs(plan: Plan, packs: dict[int, WrittenPack]) -> dict[tuple[int, str], int]:
    """Returns the CRCs of the host-local chunks that this process wrote, by leaf and name."""
    return {
        (chunk.leaf, chunk.name): fate.crc
        for pack, chunks in plan.own.items()
        for chunk, fate in zip(chunks, packs[pack].chunks, strict=True)
        if chunk.slot < 0
    }


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A pack before it is written: `size` is the whole file's, in bytes."""

    chunks: Sequence[Chunk]
    frame: HeaderFrame
    size: int


def plan_pack(plan: Plan, pack: int) -> PackPlan:
    """Returns one of this process's packs, made once a plan."""
    return plan.once(f"pack {pack}", lambda: lay_out_pack(plan, plan.own[pack]))


def lay_out_pack(plan: Plan, chunks: Sequence[Chunk]) -> PackPlan:
    """Returns a pack of these chunks."""
    entries = []
    for chunk in chunks:
        dtype = dtype_named(plan.leaves[chunk.leaf].dtype)
        assert dtype is not None
        entries.append((chunk.name, *stored_as(dtype, chunk.shape), chunk.nbytes))
    frame = HeaderFrame.around(entries)
    return PackPlan(chunks, frame, frame.nbytes + sum(chunk.nbytes for chunk in chunks))


class ChunkSums:
    """The checksums of a pack's chunks, in order, and their fates in one file, with digests if they
    are wanted.

    The checksums of large chunks that are `known`, by the chunks' places, are not computed.
    """

    def __init__(
        self, known: Mapping[int, ChunkChecksum] = _NONE, *, with_digests: bool = False
    ) -> None:
        self._known = known
        self._with_digests = with_digests
        self.checksums: list[ChunkChecksum] = []
        self.fates: list[ChunkFate] = []

    def _add(self, checksum: ChunkChecksum, digest: RunningDigest | None) -> None:
        self.checksums.append(checksum)
        self.fates.append(ChunkFate(0, checksum.crc, None if digest is None else digest.result()))

    def _begin_digest(self) -> RunningDigest | None:
        return RunningDigest() if self._with_digests else None

    def add_small(self, data: memoryview) -> None:
        """Adds a chunk below LARGE_BYTES."""
        digest = self._begin_digest()
        if digest is not None:
            digest.add(data)
        self._add(ChunkChecksum(crc32c(data)), digest)

    def add_large(self, data: memoryview, piece_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yields the pieces of a chunk and where they begin, each summed just before.

        `piece_bytes` is a multiple of PIECE_BYTES.
        """
        known = self._known.get(len(self.checksums))
        summed = RunningChecksum()
        digest = self._begin_digest()
        for start in range(0, data.nbytes, piece_bytes):
            piece = data[start : start + piece_bytes]
            if known is None:
                summed.add(piece)
            if digest is not None:
                digest.add(piece)
            yield start, piece
        self._add(summed.result() if known is None else known, digest)


def pack_parts(
    pack: PackPlan, shards: list[Any], sums: ChunkSums, piece_bytes: int = PIECE_BYTES
) -> Iterator[Part]:
    """Yields the file's parts, each summed just before; the header comes last.

    A large chunk comes in pieces of so many bytes, a multiple of PIECE_BYTES. A chunk's shard is
    dropped from `shards` once it is written.
    """
    offset = pack.frame.nbytes
    batch = []
    held = 0
    for index, chunk in enumerate(pack.chunks):
        data = chunk_bytes(shards[index], chunk)
        shards[index] = None
        is_large = data.nbytes >= LARGE_BYTES
        if not is_large:
            sums.add_small(data)
            batch.append(data)
            held += data.nbytes
            if held < PIECE_BYTES and len(batch) < BATCH_BUFFERS:
                continue
        if batch:
            yield offset, batch
            offset += held
            batch = []
            held = 0
        if is_large:
            for start, piece in sums.add_large(data, piece_bytes):
                yield offset + start, [piece]
            offset += data.nbytes
    if batch:
        yield offset, batch
    yield 0, [memoryview(pack.frame.join(sums.checksums))]


def _head_first(parts: Iterator[Part]) -> Iterator[Part]:
    """Yields a pack's parts in their order in the file, for a store that streams them.

    The header has the checksums of all chunks, so these are all summed first. Their bytes are held
    meanwhile, each until it is on its way.
    """
    *body, head = parts
    yield head
    body.reverse()
    while body:
        yield body.pop()


def chunk_bytes(shard: Any, chunk: Chunk) -> memoryview:
    """Returns the bytes of a chunk of a numpy array or Shard, in C order.

    They are a view unless the array is laid out otherwise.
    """
    array: Any = shard if isinstance(shard, np.ndarray) else shard.get()
    region: Any = array if chunk.inside is None else array[chunk.inside]
    data: Any = np.ascontiguousarray(region).reshape(-1).view(np.uint8)
    return memoryview(data)

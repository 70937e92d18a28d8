"""Divides packs that are longer than a store takes.

The same chunks get more files, and a record that names them. Nothing but headers is read for it,
and it is the same each time, so that a copy that was cut off goes on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from crc32c import crc32c

from ..format.grid import Ints, chunk_name
from ..format.item_report import FileReport, pack_name
from ..format.pack_header import HEADER_BYTES, ChunkEntry, HeaderFrame
from ..format.record import ItemRecord, LeafRecord, Record, chunk_runs, parse_record
from ..restoring.reader import ItemReader
from ..storage.path import StorePath
from ..storage.tombstone import sealed_json

NamedChunk: TypeAlias = tuple[str, ChunkEntry]


@dataclass(frozen=True)
class CopyJob:
    """One file of a copy: `head`, and then `length` bytes of the source's file from `offset` on."""

    name: str
    source: str
    length: int
    offset: int = 0
    head: bytes = b""

    @property
    def size(self) -> int:
        return len(self.head) + self.length


class _NewFile(NamedTuple):
    """A file of the new record, which of the old files it is of, and the names of its chunks (none:
    those of the old file).
    """

    job: CopyJob
    head: int
    crc: int
    old: int
    chunks: Sequence[str] = ()

    @property
    def entry(self) -> list[Any]:
        """What the record has of the file."""
        return [self.job.name, self.job.size, self.head, self.crc]


def repack(
    source: StorePath, record: Record, data: bytes, limit_bytes: int | None
) -> tuple[list[CopyJob], bytes]:
    """Returns the files of a copy of a step, none longer than `limit_bytes`, and its record.

    `data` is the record of the source. Raises Corrupt or HostileCheckpoint where a pack's header is
    not what it was.
    """
    jobs: list[CopyJob] = []
    about: dict[str, Any] | None = None
    for item in record.items.values():
        longest = max((file.size for file in item.files), default=0)
        if item.kind != "tree" or limit_bytes is None or longest <= limit_bytes:
            jobs += [CopyJob(file.name, file.name, file.size) for file in item.files]
            continue
        if about is None:
            about = json.loads(data)
        files = _divide(source, item, limit_bytes)
        _rewrite(about["items"][item.name], item, files)
        jobs += [file.job for file in files]
    if about is None:
        return jobs, data
    del about["crc32c"]
    new = sealed_json(about)
    parse_record(new, str(source))
    return jobs, new


def _divide(source: StorePath, item: ItemRecord, limit_bytes: int) -> list[_NewFile]:
    """Returns what becomes of the files of an item; a process's packs are numbered anew."""
    headers = ItemReader(source.storage, source.name, item).load_headers(
        index for index, file in enumerate(item.files) if file.size > limit_bytes
    )
    numbers: Counter[str] = Counter()
    divided: list[_NewFile] = []
    for index, file in enumerate(item.files):
        digits, _, save_id = file.name.rpartition("/")[2].removesuffix(".safetensors").split("-")
        groups: Iterable[Sequence[NamedChunk]] = [()]
        if index in headers:
            groups = _groups(headers[index], limit_bytes - HEADER_BYTES)
        for chunks in groups:
            name = f"{item.name}/{pack_name(int(digits), numbers[digits], save_id)}"
            numbers[digits] += 1
            divided.append(_part_of(file, index, name, chunks))
    return divided


def _part_of(file: FileReport, index: int, name: str, chunks: Sequence[NamedChunk]) -> _NewFile:
    """Returns the new file that has some chunks of a pack, which lie one behind the other.

    With no chunks it is the whole old file.
    """
    if not chunks:
        return _NewFile(CopyJob(name, file.name, file.size), file.head, file.crc, index)
    frame = HeaderFrame.around(
        [(chunk, entry.dtype, entry.shape, entry.nbytes) for chunk, entry in chunks]
    )
    head = frame.join([entry.checksum for _, entry in chunks])
    length = sum(entry.nbytes for _, entry in chunks)
    job = CopyJob(name, file.name, length, chunks[0][1].start, head=head)
    return _NewFile(job, len(head), crc32c(head), index, [chunk for chunk, _ in chunks])


def _groups(header: Mapping[str, ChunkEntry], limit_bytes: int) -> Iterator[list[NamedChunk]]:
    """Yields runs of a pack's chunks, in its order, of at most so many bytes."""
    group: list[NamedChunk] = []
    held = 0
    for name, entry in sorted(header.items(), key=lambda pair: (pair[1].start, pair[1].nbytes)):
        if group and held + entry.nbytes > limit_bytes:
            yield group
            group = []
            held = 0
        group.append((name, entry))
        held += entry.nbytes
    yield group


def _rewrite(about: dict[str, Any], item: ItemRecord, files: Sequence[_NewFile]) -> None:
    """Puts the new files into the record of an item, and for each leaf where its chunks are."""
    about["files"] = [file.entry for file in files]
    firsts: dict[int, int] = {}  # of the new files that an old one became
    for number, file in enumerate(files):
        firsts.setdefault(file.old, number)
    of_chunk = _files_of_chunks(files)
    tables: dict[bytes, int] = {}
    about["cells"] = []
    for leaf, facts in zip(item.leaves, about["leaves"], strict=True):
        if leaf.files is None:
            continue
        where = _places(leaf, leaf.files, of_chunk, firsts)
        key = where.tobytes()
        if key not in tables:
            tables[key] = len(about["cells"])
            about["cells"].append(chunk_runs(where))
        facts["cells"] = tables[key]


def _files_of_chunks(files: Sequence[_NewFile]) -> dict[tuple[int, str], int]:
    """Returns the new files of chunks, by their names and by the old file too: a later save may
    have written a chunk anew, and its old one is still in a file that was linked.
    """
    return {(file.old, chunk): number for number, file in enumerate(files) for chunk in file.chunks}


def _places(
    leaf: LeafRecord, old: Ints, of_chunk: Mapping[tuple[int, str], int], firsts: Mapping[int, int]
) -> Ints:
    """Returns the new file of each chunk of a leaf: by its old file and its name, or the one that
    its old file is as a whole.
    """
    assert leaf.grid is not None
    where = old.copy()
    for index, file in enumerate(old.tolist()):
        name = chunk_name(leaf.path, leaf.grid.region(index), leaf.shape)
        where[index] = of_chunk.get((file, name), firsts[file])
    return where

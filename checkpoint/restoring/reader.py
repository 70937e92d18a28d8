"""Reads chunks of one item, verified: coalesced ranges, side by side, into aligned memory."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from crc32c import crc32c

from ..errors import Corrupt, HostileCheckpoint, StepGone
from ..format.dtypes import stored_as
from ..format.files import FileReport
from ..format.grid import chunk_name
from ..format.pack_header import HEADER_LIMIT_BYTES, ChunkEntry, parse_header
from ..format.record import ItemRecord, LeafRecord
from ..storage.base import Storage, run_side_by_side
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .devices import Region

RANGE_BYTES = 16 << 20  # one read of small chunks, with what lies between them
GAP_BYTES = 64 << 10  # read over rather than asking twice
LARGE_BYTES = 1 << 20  # chunks from here on are read straight to where they go
STEP_BYTES = 4 << 20  # of a large chunk, read and checksummed in turn


Allocate: TypeAlias = Callable[[int], np.ndarray[Any, Any]]  # makes 64-aligned memory of so many bytes


@dataclass(eq=False, slots=True)
class ReadRequest:
    """A request for a region of a leaf as one array, which is None until its bytes are there."""

    leaf: LeafRecord
    region: Region
    array: np.ndarray[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.leaf.numpy_dtype.itemsize


class ArrayReader(Protocol):
    """What a restore asks of any layout."""

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array; raises Corrupt naming file and leaf, HostileCheckpoint, or StepGone."""


@dataclass(eq=False, slots=True)
class ChunkRead:
    """A chunk that is needed, and the requests that need some of it."""

    leaf: LeafRecord
    region: Region
    entry: ChunkEntry
    reads: list[ReadRequest] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.reads) == 1 and self.reads[0].region == self.region

    @property
    def is_small(self) -> bool:
        return self.entry.nbytes < LARGE_BYTES


class _ChunkShape(NamedTuple):
    region: Region
    suffix: str  # of the chunk's name, after the leaf's path
    expected: tuple[str, tuple[int, ...], int]  # dtype, shape and bytes as a pack's header has them


class ItemReader:
    """Reads one item of one step; used by one restore, from one thread."""

    def __init__(self, storage: Storage, step_dir: str, item: ItemRecord) -> None:
        self._storage, self._step_dir, self._item = storage, step_dir, item
        self._headers: dict[int, dict[str, ChunkEntry]] = {}
        self._shapes: dict[tuple[Any, ...], _ChunkShape] = {}

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        chunks = self._chunks_of(reads)
        brought = {id(chunk.reads[0]) for found in chunks.values() for chunk in found if chunk.is_whole and chunk.is_small}
        for read in reads:
            if id(read) not in brought:
                read.array = _as_array(read, allocate(read.nbytes))
        groups = [(file, group) for file, found in sorted(chunks.items()) for group in _groups(found)]
        work = [(file, group, allocate(_span(group)) if group[0].is_small else None) for file, group in groups]
        run_side_by_side(lambda args: self._read(*args), work, self._storage.max_concurrency)

    def _chunks_of(self, reads: Iterable[ReadRequest]) -> dict[int, list[ChunkRead]]:
        """Returns what must be read, by file, in the order of the file."""
        needed: dict[tuple[int, int], tuple[LeafRecord, int, list[ReadRequest]]] = {}
        for read in reads:
            leaf = read.leaf
            assert leaf.files is not None
            for index in _chunk_indices(read) if read.nbytes else ():
                key = (id(leaf), index)
                if key in needed:
                    needed[key][2].append(read)
                else:
                    needed[key] = (leaf, int(leaf.files[index]), [read])
        self.load_headers({file for _, file, _ in needed.values()})
        found: dict[int, list[ChunkRead]] = {}
        for (_, index), (leaf, file, users) in needed.items():
            found.setdefault(file, []).append(self.chunk_read(leaf, index, file, users))
        for chunks in found.values():
            chunks.sort(key=_position)
        return found

    def chunk_read(self, leaf: LeafRecord, index: int, file: int, reads: list[ReadRequest]) -> ChunkRead:
        """Returns one chunk, having checked that the pack describes it as the record does."""
        shape = self._shape(leaf, index)
        entry = self._headers[file].get(leaf.path + shape.suffix)
        if entry is None or (entry.dtype, entry.shape, entry.nbytes) != shape.expected:
            path, name = self._path(self._item.files[file]), leaf.path + shape.suffix
            if entry is None:
                raise Corrupt(f"{path}: the chunk {name!r} is not in this pack", path=path, file=path, leaf=leaf.path)
            dtype, sizes, _ = shape.expected
            message = f"{path}: the chunk {name!r} is {entry.dtype}{list(entry.shape)}, the record says {dtype}{list(sizes)}"
            raise HostileCheckpoint(message, path=path, file=path)
        return ChunkRead(leaf, shape.region, entry, reads)

    def _shape(self, leaf: LeafRecord, index: int) -> _ChunkShape:
        """Returns what chunks of one index have in common in all leaves of one dtype and grid."""
        key = (leaf.dtype, id(leaf.grid), index)
        found = self._shapes.get(key)
        if found is None:
            assert leaf.grid is not None
            region, dtype = leaf.grid.region(index), leaf.numpy_dtype
            shape = tuple(stop - start for start, stop in region)
            expected = (*stored_as(dtype, shape), math.prod(shape) * dtype.itemsize)
            found = self._shapes[key] = _ChunkShape(region, chunk_name("", region, leaf.shape), expected)
        return found

    def check_all(self) -> None:
        """Reads every chunk of every leaf, several at a time, and keeps none; the headers must list these chunks and no others."""
        self.load_headers(range(len(self._item.files)))
        chunks: dict[int, list[ChunkRead]] = {}
        for leaf in self._item.leaves:
            for index, file in enumerate(leaf.files if leaf.files is not None else ()):
                chunks.setdefault(int(file), []).append(self.chunk_read(leaf, index, int(file), []))
        named = sum(map(len, chunks.values()))
        if named != sum(map(len, self._headers.values())):
            path = join(self._storage.root, self._step_dir, self._item.name)
            raise HostileCheckpoint(f"{path}: the packs hold other chunks than the {named} that the record names", path=path, file=path)
        for found in chunks.values():
            found.sort(key=_position)
        groups = [(file, group) for file, found in sorted(chunks.items()) for group in _groups(found)]
        scratch = threading.local()  # one buffer a thread, used again: fresh memory costs more than the checksum
        run_side_by_side(lambda group: self._check_group(group[0], group[1], scratch), groups, self._storage.max_concurrency)

    def _check_group(self, file: int, group: Sequence[ChunkRead], scratch: threading.local) -> None:
        report, chunk = self._item.files[file], group[0]
        if not hasattr(scratch, "memory"):
            scratch.memory = memoryview(bytearray(RANGE_BYTES + LARGE_BYTES))
        memory: memoryview = scratch.memory
        if chunk.is_small:
            first = chunk.entry.start
            self.read_range(report, first, [memory[: _end(group[-1]) - first]], chunk.leaf.path)
            for each in group:
                self._check(report, each, crc32c(memory[each.entry.start - first : _end(each) - first]))
            return
        crc = 0
        for start in range(0, chunk.entry.nbytes, STEP_BYTES):
            step = memory[: min(STEP_BYTES, chunk.entry.nbytes - start)]
            self.read_range(report, chunk.entry.start + start, [step], chunk.leaf.path)
            crc = crc32c(step, crc)
        self._check(report, chunk, crc)

    def load_headers(self, files: Iterable[int]) -> dict[int, dict[str, ChunkEntry]]:
        """Reads and checks the headers of packs that are not known yet; returns all that are."""
        missing = [file for file in sorted(files) if file not in self._headers]
        self._headers.update(zip(missing, run_side_by_side(self._header, missing, self._storage.max_concurrency), strict=True))
        return self._headers

    def _header(self, index: int) -> dict[str, ChunkEntry]:
        file = self._item.files[index]
        path = self._path(file)
        if not 10 <= file.head <= HEADER_LIMIT_BYTES:
            raise HostileCheckpoint(f"{path}: a header of {file.head} bytes is not one that holdfast writes", path=path, file=path)
        data = self.read_checked(file, file.head)
        if int.from_bytes(data[:8], "little") != file.head - 8:
            raise HostileCheckpoint(f"{path}: the header's length is not what the record says", path=path, file=path)
        return parse_header(data, file.size, path)

    def read_checked(self, file: FileReport, size: int) -> bytes:
        """Returns the first bytes of a file, whose checksum is in the record, having checked that the file has its size, too."""
        path, data = self._path(file), bytearray(size)
        self.read_range(file, 0, [memoryview(data)])
        if crc32c(data) != file.crc:
            what = "header" if file.head else "file"
            raise Corrupt(f"{path}: the checksum of the {what} does not fit; its bytes are not what was written", path=path, file=path)
        if self._try_read(file, file.size, [memoryview(bytearray(1))]):
            raise Corrupt(f"{path}: the file is longer than the {file.size} bytes that were written", path=path, file=path)
        if file.size and not self._try_read(file, file.size - 1, [memoryview(bytearray(1))]):
            raise Corrupt(f"{path}: the file is shorter than the {file.size} bytes that were written", path=path, file=path)
        return bytes(data)

    def read_whole(self, file: FileReport) -> bytes:
        """Returns a file that has no header, checked."""
        if file.size > HEADER_LIMIT_BYTES:
            path = self._path(file)
            raise HostileCheckpoint(f"{path}: a JSON item of {file.size} bytes is not one that holdfast writes", path=path, file=path)
        return self.read_checked(file, file.size)

    def read_range(self, file: FileReport, offset: int, buffers: Sequence[memoryview], leaf: str = "") -> None:
        """Fills the buffers from a file, or raises Corrupt where it ends before."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        got = self._try_read(file, offset, buffers)
        if got != wanted:
            path = self._path(file)
            message = f"{path}: the file ends at {offset + got} of {file.size} bytes" + (f", within the leaf {leaf!r}" if leaf else "")
            raise Corrupt(message, path=path, file=path, leaf=leaf)

    def _try_read(self, file: FileReport, offset: int, buffers: Sequence[memoryview]) -> int:
        try:
            return self._storage.read(join(self._step_dir, file.name), offset, buffers)
        except FileNotFoundError as error:
            path = self._path(file)
            try:
                record = self._storage.fetch(join(self._step_dir, RECORD_NAME), 1 << 30)
            except FileNotFoundError:
                raise StepGone(f"{path}: the step was deleted while it was being read", path=path) from error
            if f'"{file.name}"'.encode() not in record:
                raise StepGone(f"{path}: the step was overwritten while it was being read; restore it again", path=path) from error
            raise Corrupt(f"{path}: the file is missing, and the record names it", path=path, file=path) from error
        except (IsADirectoryError, NotADirectoryError) as error:
            path = self._path(file)
            raise Corrupt(f"{path}: this is not a file: {error.strerror}", path=path, file=path) from error
        except OSError as error:
            error.filename = error.filename or self._path(file)
            raise

    def _path(self, file: FileReport) -> str:
        return join(self._storage.root, self._step_dir, file.name)

    def _read(self, file: int, group: Sequence[ChunkRead], memory: np.ndarray[Any, Any] | None) -> None:
        report, chunk = self._item.files[file], group[0]
        if memory is not None:
            self._read_small(report, group, memory)
            return
        straight = _straight(chunk)
        data: Any = straight if straight is not None else np.empty(chunk.entry.nbytes, np.uint8)
        crc = 0
        for start in range(0, data.nbytes, STEP_BYTES):
            step = memoryview(data[start : start + STEP_BYTES])
            self.read_range(report, chunk.entry.start + start, [step], chunk.leaf.path)
            crc = crc32c(step, crc)
        self._check(report, chunk, crc)
        _deliver(chunk, data, skip_straight=straight is not None)

    def _read_small(self, report: FileReport, group: Sequence[ChunkRead], memory: Any) -> None:
        first = group[0].entry.start
        lead = first % 64
        self.read_range(report, first, [memoryview(memory)[lead:]], group[0].leaf.path)
        for chunk in group:
            start = lead + chunk.entry.start - first
            data = memory[start : start + chunk.entry.nbytes]
            self._check(report, chunk, crc32c(data))
            if chunk.is_whole and chunk.reads[0].array is None:
                chunk.reads[0].array = _as_array(chunk.reads[0], data)
            else:
                _deliver(chunk, data)

    def _check(self, file: FileReport, chunk: ChunkRead, crc: int) -> None:
        if crc != chunk.entry.crc:
            path, leaf = self._path(file), chunk.leaf.path
            name = chunk_name(leaf, chunk.region, chunk.leaf.shape)
            message = f"{path}: the checksum of {name!r} does not fit: its bytes are not what was written (leaf {leaf!r})"
            raise Corrupt(message, path=path, file=path, leaf=leaf)


def _chunk_indices(read: ReadRequest) -> Iterable[int]:
    """Returns the indices of the chunks that a request touches."""
    grid = read.leaf.grid
    assert grid is not None
    if grid.num_chunks == 1:
        return (0,)
    spans = []
    for axis, (start, stop) in enumerate(read.region):
        starts = grid.starts(axis)
        spans.append(range(int(np.searchsorted(starts, start, "right")) - 1, int(np.searchsorted(starts, stop, "left"))))
    strides = [math.prod(grid.counts[axis + 1 :]) for axis in range(len(spans))]
    return [sum(map(int.__mul__, index, strides)) for index in itertools.product(*spans)]


def _groups(chunks: Sequence[ChunkRead]) -> Iterable[list[ChunkRead]]:
    """Groups small chunks that lie near each other; each large one stands alone."""
    group: list[ChunkRead] = []
    for chunk in chunks:
        if not chunk.is_small:
            yield [chunk]
            continue
        if group and (chunk.entry.start - _end(group[-1]) > GAP_BYTES or _end(chunk) - group[0].entry.start > RANGE_BYTES):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _position(chunk: ChunkRead) -> tuple[int, int]:
    """The key to sort by position in the file; of two chunks that begin alike the first is empty."""
    return chunk.entry.start, chunk.entry.nbytes


def _end(chunk: ChunkRead) -> int:
    return chunk.entry.start + chunk.entry.nbytes


def _span(group: Sequence[ChunkRead]) -> int:
    """Returns the bytes of memory for small chunks, which begin as far behind a multiple of 64 as in the file."""
    return group[0].entry.start % 64 + _end(group[-1]) - group[0].entry.start


def _straight(chunk: ChunkRead) -> np.ndarray[Any, Any] | None:
    """Returns the bytes of a request's array where all of a chunk goes in one stretch, or None."""
    for read in chunk.reads:
        offset = _offset_in(chunk.region, read)
        if offset is not None and read.array is not None:
            return read.array.reshape(-1).view(np.uint8)[offset : offset + chunk.entry.nbytes]
    return None


def _offset_in(region: Region, read: ReadRequest) -> int | None:
    """Returns where in the bytes of a request's array a region lies in one stretch, or None."""
    split = False
    for (start, stop), (first, last) in zip(region, read.region, strict=True):
        if start < first or stop > last or (split and (start, stop) != (first, last)):
            return None
        split = split or stop - start > 1
    offset = 0
    for (start, _), (first, last) in zip(region, read.region, strict=True):
        offset = offset * (last - first) + start - first
    return offset * read.leaf.numpy_dtype.itemsize


def _deliver(chunk: ChunkRead, data: np.ndarray[Any, Any], *, skip_straight: bool = False) -> None:
    """Copies what each request needs of a chunk."""
    array = data.view(chunk.leaf.numpy_dtype).reshape([stop - start for start, stop in chunk.region])
    for read in chunk.reads:
        if skip_straight and _offset_in(chunk.region, read) is not None:
            skip_straight = False
            continue
        assert read.array is not None
        bounds = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(chunk.region, read.region, strict=True)]
        into = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(bounds, read.region, strict=True))
        of = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(bounds, chunk.region, strict=True))
        read.array[into] = array[of]


def _as_array(read: ReadRequest, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return memory.view(read.leaf.numpy_dtype).reshape(read.shape)

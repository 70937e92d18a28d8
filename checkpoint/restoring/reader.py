"""Reads chunks of one item, verified: coalesced ranges, side by side, into aligned memory.

Small chunks are read whole, several at a time. Of a large one, the rows that are needed are read,
and what lies between them and the nearest ends of the prefixes that have a checksum (see
pack_header).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from crc32c import crc32c

from ..errors import CheckpointError, Corrupt, HostileCheckpoint, StepGone
from ..format.dtypes import stored_as
from ..format.grid import Ints, chunk_name
from ..format.item_report import FileReport
from ..format.limits import HEADER_LIMIT_BYTES
from ..format.pack_header import LARGE_BYTES, PREFIX_BYTES, ChunkEntry, parse_header
from ..format.record import ItemRecord, LeafRecord
from ..storage.base import Storage
from ..storage.path import join
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME
from .devices import Region

RANGE_BYTES = 16 << 20  # one read of small chunks, with what lies between them
GAP_BYTES = 64 << 10  # read over rather than asking twice
STEP_BYTES = 16 * PREFIX_BYTES  # of a large chunk, read and checksummed in turn


Allocate: TypeAlias = Callable[
    [int], np.ndarray[Any, Any]
]  # makes 64-aligned memory of so many bytes


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
        """Gives every request its array; raises Corrupt naming file and leaf, HostileCheckpoint, or
        StepGone.
        """


@dataclass(eq=False, slots=True)
class ChunkRead:
    """A chunk, or some rows of it, and the requests that need some of that.

    `region` lies in the chunk's bytes in one stretch, from `first` on.
    """

    leaf: LeafRecord
    region: Region
    entry: ChunkEntry
    reads: list[ReadRequest] = field(default_factory=list)
    first: int = 0

    @property
    def nbytes(self) -> int:
        return (
            math.prod(stop - start for start, stop in self.region) * self.leaf.numpy_dtype.itemsize
        )

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
        self._storage = storage
        self._step_dir = step_dir
        self._item = item
        self._headers: dict[int, dict[str, ChunkEntry]] = {}
        self._shapes: dict[tuple[Any, ...], _ChunkShape] = {}

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        chunks = self._chunks_of(reads)
        brought = {
            id(chunk.reads[0])
            for found in chunks.values()
            for chunk in found
            if chunk.is_whole and chunk.is_small
        }
        for read in reads:
            if id(read) not in brought:
                read.array = _as_array(read, self._allocate(read, allocate))
        groups = [
            (file, group) for file, found in sorted(chunks.items()) for group in _groups(found)
        ]
        work = [
            (file, group, allocate(_span(group)) if group[0].is_small else None)
            for file, group in groups
        ]
        run_side_by_side(lambda args: self._read(*args), work, self._storage.max_concurrency)

    def _allocate(self, read: ReadRequest, allocate: Allocate) -> np.ndarray[Any, Any]:
        try:
            return allocate(read.nbytes)
        except MemoryError as error:
            path = join(self._storage.root, self._step_dir)
            message = (
                f"{path}: there is no memory for the {read.nbytes:,} bytes of {read.leaf.path!r}"
                " that this process is to have"
            )
            raise CheckpointError(
                f"{message}; restore it divided over more processes", path=path
            ) from error

    def _chunks_of(self, reads: Iterable[ReadRequest]) -> dict[int, list[ChunkRead]]:
        """Returns what must be read, by file, in the order of the file.

        Headers come first: from then on the work is bounded by the chunks that are there, whatever
        the record claims.
        """
        wanted = [read for read in reads if read.nbytes]
        self.load_headers({file for read in wanted for file in _files_of(read)})
        needed: dict[tuple[int, int], ChunkRead] = {}
        found: dict[int, list[ChunkRead]] = {}
        for read in wanted:
            assert read.leaf.files is not None
            for index in _chunk_indices(read).tolist():
                chunk = needed.get((id(read.leaf), index))
                if chunk is None:
                    file = int(read.leaf.files[index])
                    chunk = needed[id(read.leaf), index] = self.chunk_read(
                        read.leaf, index, file, []
                    )
                    found.setdefault(file, []).append(chunk)
                chunk.reads.append(read)
        return {
            file: sorted((part for chunk in chunks for part in _parts(chunk)), key=_position)
            for file, chunks in found.items()
        }

    def chunk_read(
        self, leaf: LeafRecord, index: int, file: int, reads: list[ReadRequest]
    ) -> ChunkRead:
        """Returns one chunk, having checked that the pack describes it as the record does."""
        shape = self._shape(leaf, index)
        entry = self._headers[file].get(leaf.path + shape.suffix)
        if entry is None or (entry.dtype, entry.shape, entry.nbytes) != shape.expected:
            path, name = self._path(self._item.files[file]), leaf.path + shape.suffix
            if entry is None:
                raise Corrupt(
                    f"{path}: the chunk {name!r} is not in this pack",
                    path=path,
                    file=path,
                    leaf=leaf.path,
                )
            dtype, sizes, _ = shape.expected
            message = (
                f"{path}: the chunk {name!r} is {entry.dtype}{list(entry.shape)}, the record says"
                f" {dtype}{list(sizes)}"
            )
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
            found = self._shapes[key] = _ChunkShape(
                region, chunk_name("", region, leaf.shape), expected
            )
        return found

    def check_all(self) -> None:
        """Reads every chunk of every leaf, several at a time, and keeps none. Chunks that no leaf
        names are nothing of this step.
        """
        self.load_headers(range(len(self._item.files)))
        chunks: dict[int, list[ChunkRead]] = {}
        for leaf in self._item.leaves:
            for index, file in enumerate(leaf.files if leaf.files is not None else ()):
                chunks.setdefault(int(file), []).append(self.chunk_read(leaf, index, int(file), []))
        for found in chunks.values():
            found.sort(key=_position)
        groups = [
            (file, group) for file, found in sorted(chunks.items()) for group in _groups(found)
        ]
        scratch = (
            threading.local()
        )  # one buffer a thread, used again: fresh memory costs more than the checksum
        run_side_by_side(
            lambda group: self._check_group(group[0], group[1], scratch),
            groups,
            self._storage.max_concurrency,
        )

    def _check_group(self, file: int, group: Sequence[ChunkRead], scratch: threading.local) -> None:
        report = self._item.files[file]
        chunk = group[0]
        if not hasattr(scratch, "memory"):
            scratch.memory = memoryview(bytearray(RANGE_BYTES + LARGE_BYTES))
        memory: memoryview = scratch.memory
        if not chunk.is_small:
            self._read_steps(
                report, chunk, 0, chunk.entry.nbytes, lambda start, stop: [memory[: stop - start]]
            )
            return
        first = chunk.entry.start
        self.read_range(report, first, [memory[: _end(group[-1]) - first]], chunk.leaf.path)
        for each in group:
            self._check(
                report,
                each,
                crc32c(memory[each.entry.start - first : _end(each) - first]),
                each.entry.checksum.crc,
            )

    def load_headers(self, files: Iterable[int]) -> dict[int, dict[str, ChunkEntry]]:
        """Reads and checks the headers of packs that are not known yet; returns all that are."""
        missing = [file for file in sorted(files) if file not in self._headers]
        self._headers.update(
            zip(
                missing,
                run_side_by_side(self._header, missing, self._storage.max_concurrency),
                strict=True,
            )
        )
        return self._headers

    def _header(self, index: int) -> dict[str, ChunkEntry]:
        file = self._item.files[index]
        path = self._path(file)
        if not 10 <= file.head <= HEADER_LIMIT_BYTES:
            raise HostileCheckpoint(
                f"{path}: a header of {file.head} bytes is not one that holdfast writes",
                path=path,
                file=path,
            )
        data = self.read_checked(file, file.head)
        if int.from_bytes(data[:8], "little") != file.head - 8:
            raise HostileCheckpoint(
                f"{path}: the header's length is not what the record says", path=path, file=path
            )
        return parse_header(data, file.size, path)

    def read_checked(self, file: FileReport, size: int) -> bytes:
        """Returns the first bytes of a file, whose checksum is in the record, having checked that
        the file has its size, too.
        """
        data = bytearray(size)
        self.read_range(file, 0, [memoryview(data)])
        self._check_file(file, crc32c(data))
        return bytes(data)

    def check_file(self, file: FileReport) -> None:
        """Reads a file that has no header, of any size, and keeps nothing of it."""
        for _ in self.pieces(file):
            pass

    def pieces(self, file: FileReport) -> Iterator[memoryview]:
        """Yields a file that has no header, in pieces that hold until the next; raises Corrupt
        after the last where they do not fit.
        """
        crc, memory = 0, memoryview(bytearray(min(STEP_BYTES, file.size)))
        for start in range(0, file.size, STEP_BYTES):
            step = memory[: file.size - start]
            self.read_range(file, start, [step])
            crc = crc32c(step, crc)
            yield step
        self._check_file(file, crc)

    def _check_file(self, file: FileReport, crc: int) -> None:
        """Raises Corrupt where the checksum of what the record has one for is another, or the file
        has another size.
        """
        path = self._path(file)
        if crc != file.crc:
            what = "header" if file.head else "file"
            raise Corrupt(
                f"{path}: the checksum of the {what} does not fit; its bytes are not what was"
                " written",
                path=path,
                file=path,
            )
        if self._try_read(file, file.size, [memoryview(bytearray(1))]):
            raise Corrupt(
                f"{path}: the file is longer than the {file.size} bytes that were written",
                path=path,
                file=path,
            )
        if file.size and not self._try_read(file, file.size - 1, [memoryview(bytearray(1))]):
            raise Corrupt(
                f"{path}: the file is shorter than the {file.size} bytes that were written",
                path=path,
                file=path,
            )

    def read_whole(self, file: FileReport) -> bytes:
        """Returns a file that has no header, checked."""
        if file.size > HEADER_LIMIT_BYTES:
            path = self._path(file)
            raise HostileCheckpoint(
                f"{path}: a file of {file.size} bytes is not read whole, at most 100,000,000 are",
                path=path,
                file=path,
            )
        return self.read_checked(file, file.size)

    def read_range(
        self, file: FileReport, offset: int, buffers: Sequence[memoryview], leaf: str = ""
    ) -> None:
        """Fills the buffers from a file, or raises Corrupt where it ends before."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        got = self._try_read(file, offset, buffers)
        if got != wanted:
            path = self._path(file)
            message = f"{path}: the file ends at {offset + got} of {file.size} bytes" + (
                f", within the leaf {leaf!r}" if leaf else ""
            )
            raise Corrupt(message, path=path, file=path, leaf=leaf)

    def _try_read(self, file: FileReport, offset: int, buffers: Sequence[memoryview]) -> int:
        try:
            return self._storage.read(join(self._step_dir, file.name), offset, buffers)
        except FileNotFoundError as error:
            path = self._path(file)
            try:
                record = self._storage.fetch(join(self._step_dir, RECORD_NAME), 1 << 30)
            except FileNotFoundError:
                raise StepGone(
                    f"{path}: the step was deleted while it was being read", path=path
                ) from error
            if f'"{file.name}"'.encode() not in record:
                raise StepGone(
                    f"{path}: the step was overwritten while it was being read; restore it again",
                    path=path,
                ) from error
            raise Corrupt(
                f"{path}: the file is missing, and the record names it", path=path, file=path
            ) from error
        except (IsADirectoryError, NotADirectoryError) as error:
            path = self._path(file)
            raise Corrupt(
                f"{path}: this is not a file: {error.strerror}", path=path, file=path
            ) from error
        except OSError as error:
            error.filename = error.filename or self._path(file)
            raise

    def _path(self, file: FileReport) -> str:
        return join(self._storage.root, self._step_dir, file.name)

    def _read(
        self, file: int, group: Sequence[ChunkRead], memory: np.ndarray[Any, Any] | None
    ) -> None:
        if memory is not None:
            self._read_small(self._item.files[file], group, memory)
        else:
            self._read_large(self._item.files[file], group[0])

    def _read_large(self, report: FileReport, chunk: ChunkRead) -> None:
        """Reads what is needed of a large chunk, straight to where it goes if that is one
        stretch.
        """
        straight = _straight(chunk)
        data: Any = straight if straight is not None else np.empty(chunk.nbytes, np.uint8)
        start, stop = _checked_range(chunk)
        lead, tail = bytearray(chunk.first - start), bytearray(stop - chunk.first - data.nbytes)
        buffers = _Joined([memoryview(lead), memoryview(data), memoryview(tail)])
        self._read_steps(
            report, chunk, start, stop, lambda begin, end: buffers.range(begin - start, end - start)
        )
        _deliver(chunk, data, skip_straight=straight is not None)

    def _read_steps(
        self,
        file: FileReport,
        chunk: ChunkRead,
        start: int,
        stop: int,
        buffers_of: Callable[[int, int], Sequence[memoryview]],
    ) -> None:
        """Reads a range of a chunk in steps, each checked at once where its end has a checksum."""
        crc = chunk.entry.crc_until(start)
        assert crc is not None
        for begin in range(start, stop, STEP_BYTES):
            end = min(begin + STEP_BYTES, stop)
            buffers = buffers_of(begin, end)
            self.read_range(file, chunk.entry.start + begin, buffers, chunk.leaf.path)
            for buffer in buffers:
                crc = crc32c(buffer, crc)
            if (expected := chunk.entry.crc_until(end)) is not None:
                self._check(file, chunk, crc, expected)

    def _read_small(self, report: FileReport, group: Sequence[ChunkRead], memory: Any) -> None:
        first = group[0].entry.start
        lead = first % 64
        self.read_range(report, first, [memoryview(memory)[lead:]], group[0].leaf.path)
        for chunk in group:
            start = lead + chunk.entry.start - first
            data = memory[start : start + chunk.entry.nbytes]
            self._check(report, chunk, crc32c(data), chunk.entry.checksum.crc)
            if chunk.is_whole and chunk.reads[0].array is None:
                chunk.reads[0].array = _as_array(chunk.reads[0], data)
            else:
                _deliver(chunk, data)

    def _check(self, file: FileReport, chunk: ChunkRead, crc: int, expected: int) -> None:
        if crc != expected:
            path, leaf = self._path(file), chunk.leaf.path
            name = chunk_name(leaf, chunk.region, chunk.leaf.shape)
            message = (
                f"{path}: the checksum of {name!r} does not fit: its bytes are not what was written"
                f" (leaf {leaf!r})"
            )
            raise Corrupt(message, path=path, file=path, leaf=leaf)


_ONLY: Ints = np.zeros(1, np.int64)


def _files_of(read: ReadRequest) -> list[int]:
    """Returns the files in which what a request touches lies."""
    files = read.leaf.files
    assert files is not None
    found: list[int] = (
        [int(files[0])] if len(files) == 1 else np.unique(files[_chunk_indices(read)]).tolist()
    )
    return found


def _chunk_indices(read: ReadRequest) -> Ints:
    """Returns the indices of the chunks that a request touches."""
    grid = read.leaf.grid
    assert grid is not None
    if grid.num_chunks == 1:
        return _ONLY
    indices = _ONLY
    for axis, (start, stop) in enumerate(read.region):
        starts = grid.starts(axis)
        along = np.arange(
            np.searchsorted(starts, start, "right") - 1, np.searchsorted(starts, stop, "left")
        )
        indices = (indices[:, None] * grid.counts[axis] + along).reshape(-1)
    return indices


def _parts(chunk: ChunkRead) -> Iterable[ChunkRead]:
    """Yields what must be read of a chunk: the rows that are needed where the header can check them
    alone, else the whole.
    """
    if not chunk.entry.checksum.prefixes:
        yield chunk
        return
    itemsize = chunk.leaf.numpy_dtype.itemsize
    for region, reads in _rows_of(chunk.region, chunk.reads, itemsize):
        first = _offset_in(region, chunk.region)
        assert first is not None
        yield replace(chunk, region=region, reads=reads, first=first * itemsize)


def _rows_of(
    region: Region, reads: Sequence[ReadRequest], itemsize: int
) -> Iterable[tuple[Region, list[ReadRequest]]]:
    """Yields stretches of a region that are needed, along its first axis of several rows (within a
    single row, along the next one).

    Those between which less than two prefixes end are one, so that no byte is read twice.
    """
    axis = next((axis for axis, (start, stop) in enumerate(region) if stop - start > 1), None)
    if axis is None:
        yield region, list(reads)
        return
    row_bytes = math.prod(stop - start for start, stop in region[axis + 1 :]) * itemsize
    first, last = region[axis]
    stretches: list[tuple[int, int, list[ReadRequest]]] = []
    for read in sorted(reads, key=lambda read: read.region[axis]):
        start, stop = max(first, read.region[axis][0]), min(last, read.region[axis][1])
        if stretches and (start - stretches[-1][1]) * row_bytes < 2 * PREFIX_BYTES:
            before = stretches.pop()
            stretches.append((before[0], max(before[1], stop), [*before[2], read]))
        else:
            stretches.append((start, stop, [read]))
    for start, stop, users in stretches:
        rows = (*region[:axis], (start, stop), *region[axis + 1 :])
        if stop - start > 1:
            yield rows, users
        else:
            yield from _rows_of(rows, users, itemsize)


def _checked_range(chunk: ChunkRead) -> tuple[int, int]:
    """Returns the bytes of a chunk, around those that are needed, of which the header has
    checksums.
    """
    if not chunk.entry.checksum.prefixes:
        return 0, chunk.entry.nbytes
    start = chunk.first // PREFIX_BYTES * PREFIX_BYTES
    return start, min(
        -(-(chunk.first + chunk.nbytes) // PREFIX_BYTES) * PREFIX_BYTES, chunk.entry.nbytes
    )


class _Joined:
    """Several buffers as if they were one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers

    def range(self, start: int, stop: int) -> list[memoryview]:
        """Returns the pieces of the buffers that make up a range."""
        found = []
        at = 0
        for buffer in self._buffers:
            piece = buffer[max(0, start - at) : max(0, stop - at)]
            found += [piece] if piece.nbytes else []
            at += buffer.nbytes
        return found


def _groups(chunks: Sequence[ChunkRead]) -> Iterable[list[ChunkRead]]:
    """Groups small chunks that lie near each other; each large one stands alone."""
    group: list[ChunkRead] = []
    for chunk in chunks:
        if not chunk.is_small:
            yield [chunk]
            continue
        if group and (
            chunk.entry.start - _end(group[-1]) > GAP_BYTES
            or _end(chunk) - group[0].entry.start > RANGE_BYTES
        ):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _position(chunk: ChunkRead) -> tuple[int, int]:
    """The key to sort by position in the file; of two chunks that begin alike the first is
    empty.
    """
    return chunk.entry.start + chunk.first, chunk.entry.nbytes


def _end(chunk: ChunkRead) -> int:
    return chunk.entry.start + chunk.entry.nbytes


def _span(group: Sequence[ChunkRead]) -> int:
    """Returns the bytes of memory for small chunks, which begin as far behind a multiple of 64 as
    in the file.
    """
    return group[0].entry.start % 64 + _end(group[-1]) - group[0].entry.start


def _straight(chunk: ChunkRead) -> np.ndarray[Any, Any] | None:
    """Returns the bytes of a request's array where all of a chunk goes in one stretch, or None."""
    for read in chunk.reads:
        offset = _offset_in(chunk.region, read.region)
        if offset is not None and read.array is not None:
            start = offset * chunk.leaf.numpy_dtype.itemsize
            return read.array.reshape(-1).view(np.uint8)[start : start + chunk.nbytes]
    return None


def _offset_in(region: Region, whole: Region) -> int | None:
    """Returns at which item of an array of another region a region lies in one stretch, or None."""
    split = False
    for (start, stop), (first, last) in zip(region, whole, strict=True):
        if start < first or stop > last or (split and (start, stop) != (first, last)):
            return None
        split = split or stop - start > 1
    offset = 0
    for (start, _), (first, last) in zip(region, whole, strict=True):
        offset = offset * (last - first) + start - first
    return offset


def _deliver(chunk: ChunkRead, data: np.ndarray[Any, Any], *, skip_straight: bool = False) -> None:
    """Copies what each request needs of a chunk."""
    array = data.view(chunk.leaf.numpy_dtype).reshape(
        [stop - start for start, stop in chunk.region]
    )
    for read in chunk.reads:
        if skip_straight and _offset_in(chunk.region, read.region) is not None:
            skip_straight = False
            continue
        assert read.array is not None
        bounds = [
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(chunk.region, read.region, strict=True)
        ]
        into = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(bounds, read.region, strict=True)
        )
        of = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(bounds, chunk.region, strict=True)
        )
        read.array[into] = array[of]


def _as_array(read: ReadRequest, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return memory.view(read.leaf.numpy_dtype).reshape(read.shape)

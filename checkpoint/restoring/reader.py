"""Reads chunks of one item, verified: coalesced ranges, side by side, into aligned memory.

Small chunks are read whole, several at a time. Of a large chunk the needed rows are read, with
the bytes up to the nearest ends of prefixes that have a checksum (see pack_header).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from crc32c import crc32c

from ..arrays.dtypes import stored_as
from ..errors import CheckpointError, Corrupt, HostileCheckpoint, StepGone, StepNotFound
from ..format.grid import Grid, Ints, chunk_name
from ..format.item_report import FileReport
from ..format.limits import HEADER_LIMIT_BYTES
from ..format.pack_header import LARGE_BYTES, PREFIX_BYTES, ChunkEntry, parse_header
from ..format.record import ItemRecord, LeafRecord, fetch_record
from ..storage.base import HasCopies, KeepsFilesOpen, Storage, TellsSizes
from ..storage.path import join
from ..storage.sure_read import read_surely
from ..storage.threads import run_side_by_side
from .devices import Region, overlap, slices_in

_log = logging.getLogger(__name__)
RANGE_BYTES = 16 << 20  # one read of small chunks, with what lies between them
GAP_BYTES = 64 << 10  # read over rather than asking twice
STEP_BYTES = 4 * PREFIX_BYTES  # of a large chunk, read and checksummed in turn: in a core's cache
REQUEST_BYTES = 16 << 20  # the same where each step is a request over a network


T = TypeVar("T")

# Makes 64-aligned memory of so many bytes.
Allocate: TypeAlias = Callable[[int], np.ndarray[Any, Any]]


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

    def take(self, array: np.ndarray[Any, Any]) -> None:
        """Takes the array whose bytes are there, or will be."""
        self.array = array

    def lie_in(self, memory: np.ndarray[Any, Any]) -> None:
        """Makes the array of this memory, which has exactly its bytes."""
        self.array = memory.view(self.leaf.numpy_dtype).reshape(self.shape)


class ArrayReader(Protocol):
    """What a restore asks of any layout."""

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array.

        Raises Corrupt, which names file and leaf, HostileCheckpoint or StepGone.
        """


@runtime_checkable
class ForeseeingReader(Protocol):
    """A reader that is told first what it will be asked for, in all of its calls."""

    def foresee(self, reads: Iterable[ReadRequest]) -> None:
        """Takes notice of all that `fill` will be asked for. Called once, if at all."""


def foresee(reader: ArrayReader, reads: Iterable[ReadRequest]) -> None:
    """Tells a reader all that it will be asked for, if it can make use of that."""
    if isinstance(reader, ForeseeingReader):
        reader.foresee(reads)


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
        count = math.prod(stop - start for start, stop in self.region)
        return count * self.leaf.numpy_dtype.itemsize

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


class RangeRead(NamedTuple):
    """A range of a file that is read at once. `read` checks it; called again it reads it again."""

    file: int
    start: int
    stop: int
    read: Callable[[], None]


class ItemReader:
    """Reads one item of one step; used by one restore, from one thread."""

    def __init__(self, storage: Storage, step_dir: str, item: ItemRecord) -> None:
        self._storage = storage
        # To ask this of a class costs as much as several small reads: once is enough.
        self._keeps_open = storage if isinstance(storage, KeepsFilesOpen) else None
        self._step_dir = step_dir
        self._item = item
        self._headers: dict[int, dict[str, ChunkEntry]] = {}
        self._shapes: dict[tuple[Any, ...], _ChunkShape] = {}
        self._indices: dict[tuple[int, Region], Ints] = {}
        self.on_disk = storage.posix is not None
        self.step_bytes = STEP_BYTES if self.on_disk else REQUEST_BYTES

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        chunks = self._chunks_of(reads)
        # A small chunk that is all of a request is read where the array then stays.
        brought = {
            id(chunk.reads[0])
            for chunks_of_file in chunks.values()
            for chunk in chunks_of_file
            if chunk.is_whole and chunk.is_small
        }
        for read in reads:
            if id(read) not in brought:
                read.lie_in(self._allocate(read, allocate))
        work = [
            each for file, group in _grouped(chunks) for each in self._work(file, group, allocate)
        ]
        self._before_reading(work)
        run_side_by_side(self._read, work, self._storage.max_concurrency)

    def _work(
        self, file: int, group: Sequence[ChunkRead], allocate: Allocate
    ) -> Iterable[RangeRead]:
        """Yields the ranges in which a group is read."""
        report = self._item.files[file]
        first = group[0]
        if not first.is_small:
            for start, stop, read in _LargeRead(self, report, first).work():
                at = first.entry.start
                yield RangeRead(file, at + start, at + stop, read)
            return
        read = partial(self._read_small, report, group, allocate(_span(group)))
        yield RangeRead(file, first.entry.start, _end(group[-1]), read)

    def _before_reading(self, work: list[RangeRead]) -> None:
        """Takes notice of what will be read; a reader that shares its bytes changes the order."""

    def _read(self, work: RangeRead) -> None:
        """Reads a range, on any thread."""
        self._whole(self._item.files[work.file], work.read)

    def _whole(self, file: FileReport, read: Callable[[], T]) -> T:
        """Returns what `read` brings of a file; where that is damaged, from the next source."""
        while True:
            try:
                return read()
            except Corrupt as error:
                if not self._distrust(file):
                    raise
                _log.warning("another copy is read instead: %s", error)

    def _distrust(self, file: FileReport) -> bool:
        """Says whether a file, whose bytes this thread has found damaged, has another source."""
        storage = self._storage
        return isinstance(storage, HasCopies) and storage.distrust(join(self._step_dir, file.name))

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
        wanted = [(read, self._chunk_indices(read)) for read in reads if read.nbytes]
        touched: set[int] = set()
        for read, indices in wanted:
            assert read.leaf.files is not None
            touched.update(read.leaf.files[indices].tolist())
        self.load_headers(touched)
        needed: dict[tuple[int, int], ChunkRead] = {}
        by_file: dict[int, list[ChunkRead]] = {}
        for read, indices in wanted:
            assert read.leaf.files is not None
            for index in indices.tolist():
                chunk = needed.get((id(read.leaf), index))
                if chunk is None:
                    file = int(read.leaf.files[index])
                    chunk = self.chunk_read(read.leaf, index, file)
                    needed[id(read.leaf), index] = chunk
                    by_file.setdefault(file, []).append(chunk)
                chunk.reads.append(read)
        return {
            file: sorted((part for chunk in chunks for part in _parts(chunk)), key=_position)
            for file, chunks in by_file.items()
        }

    def ranges_of(self, reads: Iterable[ReadRequest]) -> Iterator[tuple[int, int, int]]:
        """Yields the file, the start and the end of each range that the requests need."""
        for file, chunks in self._chunks_of(reads).items():
            for chunk in chunks:
                start, stop = _checked_range(chunk)
                yield file, chunk.entry.start + start, chunk.entry.start + stop

    def _chunk_indices(self, read: ReadRequest) -> Ints:
        """Returns the indices of the chunks that a request touches.

        They are worked out once for all leaves of one grid.
        """
        grid = read.leaf.grid
        assert grid is not None
        key = (id(grid), read.region)
        if key not in self._indices:
            self._indices[key] = _chunk_indices(grid, read.region)
        return self._indices[key]

    def chunk_read(self, leaf: LeafRecord, index: int, file: int) -> ChunkRead:
        """Returns one chunk, having checked that the pack describes it as the record does."""
        shape = self._shape(leaf, index)
        entry = self._headers[file].get(leaf.path + shape.suffix)
        if entry is None:
            name = leaf.path + shape.suffix
            report = self._item.files[file]
            raise self._corrupt(report, f"the chunk {name!r} is not in this pack", leaf.path)
        if (entry.dtype, entry.shape, entry.nbytes) != shape.expected:
            name = leaf.path + shape.suffix
            dtype, sizes, _ = shape.expected
            raise self._hostile(
                self._item.files[file],
                f"the chunk {name!r} is {entry.dtype}{list(entry.shape)}, the record says"
                f" {dtype}{list(sizes)}",
            )
        return ChunkRead(leaf, shape.region, entry)

    def _shape(self, leaf: LeafRecord, index: int) -> _ChunkShape:
        """Returns what chunks of one index have in common in all leaves of one dtype and grid."""
        key = (leaf.dtype, id(leaf.grid), index)
        known = self._shapes.get(key)
        if known is not None:
            return known
        assert leaf.grid is not None
        region = leaf.grid.region(index)
        sizes = tuple(stop - start for start, stop in region)
        nbytes = math.prod(sizes) * leaf.numpy_dtype.itemsize
        expected = (*stored_as(leaf.numpy_dtype, sizes), nbytes)
        shape = _ChunkShape(region, chunk_name("", region, leaf.shape), expected)
        self._shapes[key] = shape
        return shape

    def check_all(self) -> None:
        """Reads every chunk of every leaf, several at a time, and keeps none.

        Chunks that no leaf names are nothing of this step.
        """
        self.load_headers(range(len(self._item.files)))
        chunks: dict[int, list[ChunkRead]] = {}
        for leaf in self._item.leaves:
            for index, file in enumerate(leaf.files if leaf.files is not None else ()):
                chunks.setdefault(int(file), []).append(self.chunk_read(leaf, index, int(file)))
        for chunks_of_file in chunks.values():
            chunks_of_file.sort(key=_position)
        scratch = _Scratch()
        work: list[Callable[[], None]] = []
        for file, group in _grouped(chunks):
            report = self._item.files[file]
            chunk = group[0]
            if chunk.is_small:
                work.append(partial(self._check_small, report, group, scratch))
                continue
            steps = _Steps(self, report, chunk)
            for start, stop in steps.divide(0, chunk.entry.nbytes):
                work.append(partial(steps.check, start, stop, scratch.buffers))
        run_side_by_side(lambda check: check(), work, self._storage.max_concurrency)

    def _check_small(
        self, report: FileReport, group: Sequence[ChunkRead], scratch: _Scratch
    ) -> None:
        first = group[0].entry.start
        memory = scratch.memory
        buffers = scratch.buffers(first, _end(group[-1]))
        self.read_range(report, first, buffers, group[0].leaf.path)
        for each in group:
            crc = crc32c(memory[each.entry.start - first : _end(each) - first])
            self.check(report, each, crc, each.entry.checksum.crc)

    def load_headers(self, files: Iterable[int]) -> dict[int, dict[str, ChunkEntry]]:
        """Reads and checks the headers of packs that are not known yet; returns all that are."""
        missing = [file for file in sorted(files) if file not in self._headers]
        read = run_side_by_side(self._header, missing, self._storage.max_concurrency)
        self._headers.update(zip(missing, read, strict=True))
        return self._headers

    def _header(self, index: int) -> dict[str, ChunkEntry]:
        file = self._item.files[index]
        if not 10 <= file.head <= HEADER_LIMIT_BYTES:
            text = f"a header of {file.head} bytes is not one that holdfast writes"
            raise self._hostile(file, text)
        data = self._whole(file, lambda: self.read_checked(file, file.head))
        if int.from_bytes(data[:8], "little") != file.head - 8:
            raise self._hostile(file, "the header's length is not what the record says")
        return parse_header(data, file.size, self._path(file))

    def read_checked(self, file: FileReport, size: int) -> bytes:
        """Returns the first bytes of a file, whose checksum is in the record.

        Checks them, and that the file has its size.
        """
        data = bytearray(size)
        buffers = [memoryview(data)]
        storage = self._storage
        found: int | None = None
        if isinstance(storage, TellsSizes):
            name = join(self._step_dir, file.name)
            got, found = self._surely(file, lambda: storage.read_sized(name, 0, buffers))
            self._check_length(file, 0, got, size)
            self._check_file(file, crc32c(data), found)
            return bytes(data)
        with self.kept_open(file):
            self.read_range(file, 0, buffers)
            self._check_file(file, crc32c(data))
        return bytes(data)

    def check_file(self, file: FileReport) -> None:
        """Reads a file that has no header, of any size, and keeps nothing of it."""
        for _ in self.pieces(file):
            pass

    def pieces(self, file: FileReport) -> Iterator[memoryview]:
        """Yields a file that has no header, in pieces that hold until the next.

        Raises Corrupt after the last piece where the checksum does not fit.
        """
        if isinstance(self._storage, HasCopies):  # which is whole is known before any is given
            self._whole(file, lambda: collections.deque(self._pieces(file), maxlen=0))
        yield from self._pieces(file)

    def _pieces(self, file: FileReport) -> Iterator[memoryview]:
        crc = 0
        memory = memoryview(bytearray(min(self.step_bytes, file.size)))
        for start in range(0, file.size, self.step_bytes):
            step = memory[: file.size - start]
            self.read_range(file, start, [step])
            crc = crc32c(step, crc)
            yield step
        self._check_file(file, crc)

    def _check_file(self, file: FileReport, crc: int, found: int | None = None) -> None:
        """Raises Corrupt where the file has another checksum than the record says, or size.

        `found` is the size, where the store has told it.
        """
        if crc != file.crc:
            what = "header" if file.head else "file"
            raise self._corrupt(
                file, f"the checksum of the {what} does not fit; its bytes are not what was written"
            )
        if found is None:
            # One read says both: of its last byte, and of one behind it.
            last = max(file.size - 1, 0)
            found = last + self._try_read(file, last, [memoryview(bytearray(2))])
        if found > file.size:
            text = f"the file is longer than the {file.size} bytes that were written"
            raise self._corrupt(file, text)
        if found < file.size:
            text = f"the file is shorter than the {file.size} bytes that were written"
            raise self._corrupt(file, text)

    def read_whole(self, file: FileReport) -> bytes:
        """Returns a file that has no header, checked."""
        if file.size > HEADER_LIMIT_BYTES:
            text = f"a file of {file.size} bytes is not read whole, at most 100,000,000 are"
            raise self._hostile(file, text)
        return self._whole(file, lambda: self.read_checked(file, file.size))

    def read_range(
        self, file: FileReport, offset: int, buffers: Sequence[memoryview], leaf: str = ""
    ) -> None:
        """Fills the buffers from a file, or raises Corrupt where it ends before."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        got = self._try_read(file, offset, buffers)
        self._check_length(file, offset, got, wanted, leaf)

    def _check_length(
        self, file: FileReport, offset: int, got: int, wanted: int, leaf: str = ""
    ) -> None:
        if got != wanted:
            where = f", within the leaf {leaf!r}" if leaf else ""
            text = f"the file ends at {offset + got} of {file.size} bytes{where}"
            raise self._corrupt(file, text, leaf)

    def kept_open(self, file: FileReport) -> contextlib.AbstractContextManager[None]:
        """Has this thread's reads of a file open it once, until the context ends."""
        if self._keeps_open is not None:
            return self._keeps_open.kept_open(join(self._step_dir, file.name))
        return contextlib.nullcontext()

    def _try_read(self, file: FileReport, offset: int, buffers: Sequence[memoryview]) -> int:
        name = join(self._step_dir, file.name)
        return self._surely(file, lambda: self._storage.read(name, offset, buffers))

    def _surely(self, file: FileReport, read: Callable[[], T]) -> T:
        try:
            return read_surely(self._storage, join(self._step_dir, file.name), read)
        except FileNotFoundError as error:
            raise self._why_missing(file) from error
        except (IsADirectoryError, NotADirectoryError) as error:
            raise self._corrupt(file, f"this is not a file: {error.strerror}") from error
        except OSError as error:
            error.filename = error.filename or self._path(file)
            raise

    def _why_missing(self, file: FileReport) -> CheckpointError:
        """Returns the error of a file that is not there, by what the record says now."""
        path = self._path(file)
        try:
            record = fetch_record(self._storage, self._step_dir)
        except StepNotFound:
            return StepGone(f"{path}: the step was deleted while it was being read", path=path)
        if f'"{file.name}"'.encode() in record:
            return self._corrupt(file, "the file is missing, and the record names it")
        return StepGone(
            f"{path}: the step was overwritten while it was being read; restore it again",
            path=path,
        )

    def _path(self, file: FileReport) -> str:
        return join(self._storage.root, self._step_dir, file.name)

    def _corrupt(self, file: FileReport, text: str, leaf: str = "") -> Corrupt:
        path = self._path(file)
        return Corrupt(f"{path}: {text}", path=path, file=path, leaf=leaf)

    def _hostile(self, file: FileReport, text: str) -> HostileCheckpoint:
        path = self._path(file)
        return HostileCheckpoint(f"{path}: {text}", path=path, file=path)

    def _read_small(self, report: FileReport, group: Sequence[ChunkRead], memory: Any) -> None:
        first = group[0].entry.start
        lead = first % 64
        self.read_range(report, first, [memoryview(memory)[lead:]], group[0].leaf.path)
        for chunk in group:
            start = lead + chunk.entry.start - first
            data = memory[start : start + chunk.entry.nbytes]
            self.check(report, chunk, crc32c(data), chunk.entry.checksum.crc)
            if chunk.is_whole and chunk.reads[0].array is None:
                chunk.reads[0].lie_in(data)
            else:
                _deliver(chunk, data)

    def check(self, file: FileReport, chunk: ChunkRead, crc: int, expected: int) -> None:
        """Raises Corrupt, which names the leaf, where a chunk has another checksum."""
        if crc != expected:
            leaf = chunk.leaf.path
            name = chunk_name(leaf, chunk.region, chunk.leaf.shape)
            text = (
                f"the checksum of {name!r} does not fit: its bytes are not what was written"
                f" (leaf {leaf!r})"
            )
            raise self._corrupt(file, text, leaf)


class _Scratch(threading.local):
    """One buffer a thread, used again: fresh memory costs more than the checksum."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(RANGE_BYTES + LARGE_BYTES))

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Returns room for the bytes of a range."""
        return [self.memory[: stop - start]]


class _LargeRead:
    """What is needed of a large chunk, if it is one stretch straight to where it goes.

    It is read in ranges, in any order and on any threads.
    """

    def __init__(self, reader: ItemReader, file: FileReport, chunk: ChunkRead) -> None:
        self._steps = _Steps(reader, file, chunk)
        self._chunk = chunk
        self._start, self._stop = _checked_range(chunk)
        self._lock = threading.Lock()
        self._ranges = self._steps.divide(self._start, self._stop)
        self._left = len(self._ranges)
        self._data: np.ndarray[Any, Any] | None = None
        self._is_straight = False
        self._buffers: _Joined | None = None

    def work(self) -> list[tuple[int, int, Callable[[], None]]]:
        """Returns the ranges, and what reads each. The last that ends delivers the chunk."""
        return [(start, stop, partial(self._read, start, stop)) for start, stop in self._ranges]

    def _read(self, start: int, stop: int) -> None:
        buffers = self._opened()
        first = self._start
        self._steps.check(start, stop, lambda begin, end: buffers.range(begin - first, end - first))
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            assert self._data is not None
            if not self._is_straight or len(self._chunk.reads) > 1:
                _deliver(self._chunk, self._data, skip_straight=self._is_straight)
            self._data = None
            self._buffers = None

    def _opened(self) -> _Joined:
        """Returns where the bytes go. Memory of its own is taken with the first range only."""
        with self._lock:
            if self._buffers is None:
                chunk = self._chunk
                straight = _straight(chunk)
                self._is_straight = straight is not None
                data: Any = straight if straight is not None else np.empty(chunk.nbytes, np.uint8)
                lead = bytearray(chunk.first - self._start)
                tail = bytearray(self._stop - chunk.first - data.nbytes)
                self._buffers = _Joined([memoryview(lead), memoryview(data), memoryview(tail)])
                self._data = data
            return self._buffers


class _Steps(NamedTuple):
    """A large chunk, read in steps that are each checked at once."""

    reader: ItemReader
    file: FileReport
    chunk: ChunkRead

    def divide(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ranges of a range that are best read apart, each of which can be checked
        alone.

        On a disk that is one, whose file is opened once.
        """
        step_bytes = self.reader.step_bytes
        if self.reader.on_disk or not self.chunk.entry.checksum.prefixes:
            return [(start, stop)]
        return [(at, min(at + step_bytes, stop)) for at in range(start, stop, step_bytes)]

    def check(
        self, start: int, stop: int, buffers_of: Callable[[int, int], Sequence[memoryview]]
    ) -> None:
        """Reads a range into the buffers, and checks each step whose end has a checksum."""
        with self.reader.kept_open(self.file):
            self._check(start, stop, buffers_of)

    def _check(
        self, start: int, stop: int, buffers_of: Callable[[int, int], Sequence[memoryview]]
    ) -> None:
        entry = self.chunk.entry
        crc = entry.crc_until(start)
        assert crc is not None
        step_bytes = self.reader.step_bytes
        for begin in range(start, stop, step_bytes):
            end = min(begin + step_bytes, stop)
            buffers = buffers_of(begin, end)
            self.reader.read_range(self.file, entry.start + begin, buffers, self.chunk.leaf.path)
            for buffer in buffers:
                crc = crc32c(buffer, crc)
            expected = entry.crc_until(end)
            if expected is not None:
                self.reader.check(self.file, self.chunk, crc, expected)


_ONLY: Ints = np.zeros(1, np.int64)


def _chunk_indices(grid: Grid, region: Region) -> Ints:
    """Returns the indices of the chunks that a region touches."""
    if grid.num_chunks == 1:
        return _ONLY
    indices = _ONLY
    for axis, (start, stop) in enumerate(region):
        starts = grid.starts(axis)
        first = np.searchsorted(starts, start, "right") - 1
        along = np.arange(first, np.searchsorted(starts, stop, "left"))
        indices = (indices[:, None] * grid.counts[axis] + along).reshape(-1)
    return indices


def _parts(chunk: ChunkRead) -> Iterable[ChunkRead]:
    """Yields what must be read of a chunk.

    That is the rows that are needed where the header can check them alone, else the whole.
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
    """Yields the stretches of a region that are needed, along its first axis of several rows.

    Within a single row they lie along the next axis. Stretches between which less than two prefixes
    end are one, so that no byte is read twice.
    """
    axis = next((axis for axis, (start, stop) in enumerate(region) if stop - start > 1), None)
    if axis is None:
        yield region, list(reads)
        return
    row_bytes = math.prod(stop - start for start, stop in region[axis + 1 :]) * itemsize
    first, last = region[axis]
    stretches: list[tuple[int, int, list[ReadRequest]]] = []
    for read in sorted(reads, key=lambda read: read.region[axis]):
        start = max(first, read.region[axis][0])
        stop = min(last, read.region[axis][1])
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
    """Returns the range of a chunk's bytes, around the needed ones, that has checksums."""
    if not chunk.entry.checksum.prefixes:
        return 0, chunk.entry.nbytes
    start = chunk.first // PREFIX_BYTES * PREFIX_BYTES
    stop = -(-(chunk.first + chunk.nbytes) // PREFIX_BYTES) * PREFIX_BYTES
    return start, min(stop, chunk.entry.nbytes)


class _Joined:
    """Several buffers as if they were one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.nbytes]

    def range(self, start: int, stop: int) -> list[memoryview]:
        """Returns the pieces of the buffers that make up a range."""
        if len(self._buffers) == 1:
            return [self._buffers[0][start:stop]]
        pieces = []
        at = 0
        for buffer in self._buffers:
            piece = buffer[max(0, start - at) : max(0, stop - at)]
            if piece.nbytes:
                pieces.append(piece)
            at += buffer.nbytes
        return pieces


def _grouped(chunks: dict[int, list[ChunkRead]]) -> Iterator[tuple[int, list[ChunkRead]]]:
    """Yields the groups of chunks that are read together, with the number of their file."""
    for file in sorted(chunks):
        for group in _groups(chunks[file]):
            yield file, group


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
    """The key to sort by position in the file: of two that begin alike the first is empty."""
    return chunk.entry.start + chunk.first, chunk.entry.nbytes


def _end(chunk: ChunkRead) -> int:
    return chunk.entry.start + chunk.entry.nbytes


def _span(group: Sequence[ChunkRead]) -> int:
    """Returns the bytes of memory for small chunks.

    They begin as far behind a multiple of 64 as in the file.
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
    sizes = [stop - start for start, stop in chunk.region]
    array = data.view(chunk.leaf.numpy_dtype).reshape(sizes)
    for read in chunk.reads:
        if skip_straight and _offset_in(chunk.region, read.region) is not None:
            skip_straight = False
            continue
        assert read.array is not None
        common = overlap(chunk.region, read.region)
        read.array[slices_in(common, read.region)] = array[slices_in(common, chunk.region)]

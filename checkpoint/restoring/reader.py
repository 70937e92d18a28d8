"""Reads chunks of one item, verified: coalesced ranges, side by side, into aligned memory.

Small chunks are read whole, several at a time. Of a large chunk the needed rows are read, with
the bytes up to the nearest ends of prefixes that have a checksum (see pack_header).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from crc32c import crc32c

from ..arrays.dtypes import HostArray, stored_as
from ..errors import CheckpointError, Corrupt, HostileCheckpoint, StepGone, StepNotFound
from ..format.grid import Grid, Ints, Shape, chunk_name
from ..format.item_report import FileReport
from ..format.limits import HEADER_LIMIT_BYTES
from ..format.pack_header import (
    LARGE_BYTES,
    PREFIX_BYTES,
    ChunkChecksum,
    ChunkEntry,
    parse_header,
)
from ..format.record import ItemRecord, LeafRecord, fetch_record
from ..storage.base import Buffers, HasCopies, KeepsFilesOpen, Readable, TellsSizes
from ..storage.path import join
from ..storage.sure_read import read_surely
from ..storage.threads import run_side_by_side
from .devices import Region, overlap, shape_of, slices_in

_log = logging.getLogger(__name__)
RANGE_BYTES = 16 << 20  # one read of small chunks, with what lies between them
GAP_BYTES = 64 << 10  # read over rather than asking twice
STEP_BYTES = 4 * PREFIX_BYTES  # of a large chunk, read and checksummed in turn: in a core's cache
REQUEST_BYTES = 16 << 20  # the same where each step is a request over a network


T = TypeVar("T")

# Makes 64-aligned memory of so many bytes.
Allocate: TypeAlias = Callable[[int], HostArray]


@dataclass(eq=False, slots=True)
class ReadRequest:
    """A request for a region of a leaf as one array, which is None until its bytes are there."""

    leaf: LeafRecord
    region: Region
    array: HostArray | None = None

    @property
    def shape(self) -> Shape:
        return shape_of(self.region)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.leaf.numpy_dtype.itemsize

    def take(self, array: HostArray) -> None:
        """Takes the array whose bytes are there, or will be."""
        self.array = array

    def lie_in(self, memory: HostArray) -> None:
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
        return math.prod(shape_of(self.region)) * self.leaf.numpy_dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return len(self.reads) == 1 and self.reads[0].region == self.region

    @property
    def is_small(self) -> bool:
        return self.entry.nbytes < LARGE_BYTES


class _ChunkShape(NamedTuple):
    region: Region
    suffix: str  # of the chunk's name, after the leaf's path
    expected: tuple[str, Shape, int]  # dtype, shape and bytes as a pack's header has them


class Check(NamedTuple):
    """A stretch of a file whose checksum, which begins as `crc`, is to end as `expected`; `what` is
    the chunk that it is of, or its name.
    """

    start: int
    stop: int
    expected: int
    what: ChunkRead | str
    crc: int = 0


class Checker:
    """Compares what is read of a file, in its order, with checksums that come in that order too."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self._coming = iter(checks)
        self._advance()

    def _advance(self) -> None:
        self._next = next(self._coming, None)
        self._crc = 0 if self._next is None else self._next.crc

    def wrong(self, at: int, data: memoryview) -> Check | None:
        """Takes the bytes that lie `at` a place; returns the first check that they do not pass."""
        end = at + data.nbytes
        while (check := self._next) is not None and check.start < end:
            self._crc = crc32c(data[max(0, check.start - at) : check.stop - at], self._crc)
            if check.stop > end:
                break
            if self._crc != check.expected:
                return check
            self._advance()
        return None


class Destination(Protocol):
    """Where the bytes of chunks go."""

    def buffers(self, start: int, stop: int) -> Buffers:
        """Returns where those from `start` to `stop` of the file go; on any thread."""

    def deliver(self) -> None:
        """Takes notice that one of the ranges has been read and checked."""


class RangePlan(NamedTuple):
    """A range of a file that is read at once, in steps: it has chunks, or a part of one."""

    file: int
    start: int
    stop: int
    chunks: Sequence[ChunkRead]
    place: Destination


class ItemReader:
    """Reads one item of one step; used by one restore, from one thread."""

    def __init__(
        self, storage: Readable, step_dir: str, item: ItemRecord, *, step_bytes: int = 0
    ) -> None:
        self._storage = storage
        # To ask this of a class costs as much as several small reads: once is enough.
        self._keeps_open = storage if isinstance(storage, KeepsFilesOpen) else None
        self._sized = storage if isinstance(storage, TellsSizes) else None
        self._step_dir = step_dir
        self._item = item
        self._headers: dict[int, dict[str, ChunkEntry]] = {}
        self._shapes: dict[tuple[Any, ...], _ChunkShape] = {}
        self._indices: dict[tuple[int, Region], Ints] = {}
        self.on_disk = storage.posix is not None
        self.step_bytes = step_bytes or (STEP_BYTES if self.on_disk else REQUEST_BYTES)

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        chunks = self._chunks_of(reads)
        self._lay_out(reads, itertools.chain.from_iterable(chunks.values()), allocate)

        def place_of(group: Sequence[ChunkRead], ranges: int) -> Destination:
            return _Together(group, allocate) if group[0].is_small else _Apart(group[0], ranges)

        plans = list(self._plans(chunks, place_of))
        self._before_reading(plans)
        run_side_by_side(self._read, plans, self._storage.max_concurrency)

    def _lay_out(
        self, reads: Iterable[ReadRequest], chunks: Iterable[ChunkRead], allocate: Allocate
    ) -> None:
        """Gives the requests their memory. But a small chunk that is all of a request is read
        where the array then stays.
        """
        brought = {id(chunk.reads[0]) for chunk in chunks if chunk.is_whole and chunk.is_small}
        for read in reads:
            if id(read) not in brought:
                read.lie_in(self._allocate(read, allocate))

    def _plans(
        self,
        chunks: Mapping[int, list[ChunkRead]],
        place_of: Callable[[Sequence[ChunkRead], int], Destination],
    ) -> Iterator[RangePlan]:
        """Yields the ranges in which the chunks of each file are read. Reads nothing.

        Of a large chunk they are what is best read apart, and can be checked alone: over a network.
        On a disk its file is opened once.
        """
        for file in sorted(chunks):
            for group in _groups(sorted(chunks[file], key=_position)):
                ranges = [_checked_range(group)]
                if group[0].entry.checksum.prefixes and not self.on_disk:
                    ranges = list(self._steps(*ranges[0]))
                place = place_of(group, len(ranges))
                for start, stop in ranges:
                    yield RangePlan(file, start, stop, group, place)

    def _before_reading(self, plans: list[RangePlan]) -> None:
        """Takes notice of what will be read; a reader that shares its bytes changes the order."""

    def _read(self, plan: RangePlan) -> None:
        """Reads a range, on any thread."""
        file = self._item.files[plan.file]
        # A lambda would hold the plan as long as an error has its frame.
        self._whole(file, functools.partial(self._fill, file, plan))
        plan.place.deliver()

    def _fill(self, file: FileReport, plan: RangePlan) -> None:
        leaf = plan.chunks[0].leaf.path
        checker = Checker(self._checks(plan))
        with self.kept_open(file):
            for start, stop in self._steps(plan.start, plan.stop):
                buffers = plan.place.buffers(start, stop)
                self._read_range(file, start, buffers, leaf)
                for buffer in buffers:
                    self._check(file, checker, start, buffer)
                    start += buffer.nbytes

    def _steps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the parts of a range that are read and checked in turn."""
        for begin in range(start, stop, self.step_bytes):
            yield begin, min(begin + self.step_bytes, stop)

    def _checks(self, plan: RangePlan) -> Iterator[Check]:
        """Yields what a range is checked by, in the order of the file."""
        for chunk in plan.chunks:
            entry = chunk.entry
            if not entry.checksum.prefixes:
                yield Check(entry.start, _end(chunk), entry.checksum.crc, chunk)
                continue
            for start, stop in self._steps(plan.start, plan.stop):
                crc = entry.crc_until(start - entry.start)
                expected = entry.crc_until(stop - entry.start)
                assert crc is not None and expected is not None
                yield Check(start, stop, expected, chunk, crc)

    def _check(self, file: FileReport, checker: Checker, at: int, data: memoryview) -> None:
        """Raises Corrupt, which names the leaf, where bytes of a file do not pass."""
        wrong = checker.wrong(at, data)
        if wrong is not None:
            chunk = wrong.what
            if isinstance(chunk, str):
                raise self._misfit(file, chunk)
            name = chunk_name(chunk.leaf.path, chunk.region, chunk.leaf.shape)
            raise self._misfit(file, repr(name), chunk.leaf.path)

    def _misfit(self, file: FileReport, what: str, leaf: str = "") -> Corrupt:
        where = f" (leaf {leaf!r})" if leaf else ""
        return self._corrupt(
            file,
            f"the checksum of {what} does not fit: its bytes are not what was written{where}",
            leaf,
        )

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
        return isinstance(storage, HasCopies) and storage.distrust(self.name_of(file))

    def _allocate(self, read: ReadRequest, allocate: Allocate) -> HostArray:
        try:
            return allocate(read.nbytes)
        except MemoryError as error:
            path = join(self._storage.root, self._step_dir)
            raise CheckpointError(
                f"{path}: there is no memory for the {read.nbytes:,} bytes of {read.leaf.path!r}"
                " that this process is to have; restore it divided over more processes",
                path=path,
            ) from error

    def _chunks_of(self, reads: Iterable[ReadRequest]) -> dict[int, list[ChunkRead]]:
        """Returns what must be read, by file.

        Headers come first: from then on the work is bounded by the chunks that are there, whatever
        the record claims.
        """
        wanted = []  # of arrays until then: a list would be an object for each chunk
        touched: set[int] = set()
        for read in reads:
            if read.nbytes:
                assert read.leaf.files is not None
                indices = self._chunk_indices(read)
                files = read.leaf.files[indices]
                wanted.append((read, indices, files))
                touched.update(files.tolist())
        self.load_headers(touched)
        needed: dict[tuple[str, int], ChunkRead] = {}
        by_file: dict[int, list[ChunkRead]] = {}
        for read, indices, files in wanted:
            for index, file in zip(indices.tolist(), files.tolist(), strict=True):
                chunk = needed.get((read.leaf.path, index))
                if chunk is None:
                    chunk = self.chunk_read(read.leaf, index, file)
                    needed[read.leaf.path, index] = chunk
                    by_file.setdefault(file, []).append(chunk)
                chunk.reads.append(read)
        return {
            file: [part for chunk in chunks for part in _parts(chunk)]
            for file, chunks in by_file.items()
        }

    def ranges_of(self, reads: Iterable[ReadRequest]) -> Iterator[tuple[int, int, int]]:
        """Yields the file, the start and the end of each range that the requests need."""
        for file, chunks in self._chunks_of(reads).items():
            for chunk in chunks:
                yield file, *_checked_range([chunk])

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
        name = leaf.path + shape.suffix
        entry = self._headers[file].get(name)
        if entry is None:
            raise self._corrupt(
                self._item.files[file], f"the chunk {name!r} is not in this pack", leaf.path
            )
        if (entry.dtype, entry.shape, entry.nbytes) != shape.expected:
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
        sizes = shape_of(region)
        nbytes = math.prod(sizes) * leaf.numpy_dtype.itemsize
        expected = (*stored_as(leaf.numpy_dtype, sizes), nbytes)
        shape = _ChunkShape(region, chunk_name("", region, leaf.shape), expected)
        self._shapes[key] = shape
        return shape

    def check_all(self) -> None:
        """Reads every chunk of every leaf, several at a time, and keeps none.

        Chunks that no leaf names are nothing of this step.
        """
        chunks: dict[int, list[ChunkRead]] = {}
        for file, chunk in self._all_chunks():
            chunks.setdefault(file, []).append(chunk)
        scratch = _Scratch(self.step_bytes)
        plans = list(self._plans(chunks, lambda group, ranges: scratch))
        run_side_by_side(self._read, plans, self._storage.max_concurrency)

    def checksums(self) -> list[ChunkChecksum]:
        """Returns the checksum of every chunk of every leaf, as the headers have them."""
        return [chunk.entry.checksum for _, chunk in self._all_chunks()]

    def _all_chunks(self) -> Iterator[tuple[int, ChunkRead]]:
        """Yields every chunk of every leaf, with its file."""
        self.load_headers(range(len(self._item.files)))
        for leaf in self._item.leaves:
            for index, file in enumerate(leaf.files if leaf.files is not None else ()):
                yield int(file), self.chunk_read(leaf, index, int(file))

    def load_headers(self, files: Iterable[int]) -> dict[int, dict[str, ChunkEntry]]:
        """Reads and checks the headers of packs that are not known yet; returns all that are."""
        missing = [file for file in sorted(files) if file not in self._headers]
        read = run_side_by_side(self._header, missing, self._storage.max_concurrency)
        self._headers.update(zip(missing, read, strict=True))
        return self._headers

    def _header(self, index: int) -> dict[str, ChunkEntry]:
        file = self._item.files[index]
        data = self._whole(file, lambda: self._header_bytes(file))
        return parse_header(data, file.size, self._path(file))

    def _header_bytes(self, file: FileReport) -> bytes:
        if not 10 <= file.head <= HEADER_LIMIT_BYTES:
            raise self._hostile(
                file, f"a header of {file.head} bytes is not one that holdfast writes"
            )
        data = self._read_start(file, file.head)
        if int.from_bytes(data[:8], "little") != file.head - 8:
            raise self._hostile(file, "the header's length is not what the record says")
        return data

    def _read_start(self, file: FileReport, size: int) -> bytes:
        """Returns the first bytes of a file, whose checksum is in the record.

        Checks them, and that the file has its size.
        """
        data = bytearray(size)
        with self.kept_open(file):
            found = self._read_range(file, 0, [memoryview(data)])
            if crc32c(data) != file.crc:
                raise self._misfit(file, "the header" if file.head else "the file")
            self._check_size(file, found)
        return bytes(data)

    def check_file(self, file: FileReport) -> None:
        """Reads a whole file, of any size, and keeps nothing of it."""
        for _ in self.pieces(file):
            pass

    def pieces(self, file: FileReport) -> Iterator[memoryview]:
        """Yields a whole file, in pieces that hold until the next: its header first, if it has one.

        Raises Corrupt where a checksum does not fit; what was yielded of the file is void then.
        """
        if isinstance(self._storage, HasCopies):  # which is whole is known before any is given
            self._whole(file, lambda: collections.deque(self._pieces(file), maxlen=0))
        yield from self._pieces(file)

    def _pieces(self, file: FileReport) -> Iterator[memoryview]:
        checks = [Check(0, file.size, file.crc, "the file")]
        if file.head:
            data = self._header_bytes(file)
            yield memoryview(data)
            chunks = parse_header(data, file.size, self._path(file)).items()
            checks = sorted(
                Check(chunk.start, chunk.start + chunk.nbytes, chunk.checksum.crc, repr(name))
                for name, chunk in chunks
            )
        checker = Checker(checks)
        memory = memoryview(bytearray(min(self.step_bytes, file.size - file.head)))
        found: int | None = None
        for start, stop in self._steps(file.head, file.size):
            step = memory[: stop - start]
            found = self._read_range(file, start, [step])
            self._check(file, checker, start, step)
            yield step
        if not file.head:
            self._check_size(file, found)

    def _check_size(self, file: FileReport, found: int | None) -> None:
        """Raises Corrupt where the file has not the size that the record says.

        `found` is the size, where the store has told it.
        """
        if found is None:
            # One read says both: of its last byte, and of one behind it.
            last = max(file.size - 1, 0)
            found = last + self._try_read(file, last, [memoryview(bytearray(2))])[0]
        if found != file.size:
            than = "longer" if found > file.size else "shorter"
            raise self._corrupt(
                file, f"the file is {than} than the {file.size} bytes that were written"
            )

    def read_whole(self, file: FileReport) -> bytes:
        """Returns a file that has no header, checked."""
        if file.size > HEADER_LIMIT_BYTES:
            raise self._hostile(
                file, f"a file of {file.size} bytes is not read whole, at most 100,000,000 are"
            )
        return self._whole(file, lambda: self._read_start(file, file.size))

    def _read_range(
        self, file: FileReport, offset: int, buffers: Buffers, leaf: str = ""
    ) -> int | None:
        """Fills the buffers from a file, or raises Corrupt where it ends before. Returns its size,
        if the store tells it.
        """
        wanted = sum(buffer.nbytes for buffer in buffers)
        got, size = self._try_read(file, offset, buffers)
        if got != wanted:
            where = f", within the leaf {leaf!r}" if leaf else ""
            raise self._corrupt(
                file, f"the file ends at {offset + got} of {file.size} bytes{where}", leaf
            )
        return size

    def kept_open(self, file: FileReport) -> contextlib.AbstractContextManager[None]:
        """Has this thread's reads of a file open it once, until the context ends."""
        if self._keeps_open is not None:
            return self._keeps_open.kept_open(self.name_of(file))
        return contextlib.nullcontext()

    def _try_read(self, file: FileReport, offset: int, buffers: Buffers) -> tuple[int, int | None]:
        """Returns how many bytes there were, and the file's size, if the store tells it."""
        name = self.name_of(file)
        sized = self._sized
        if sized is not None:
            return self._surely(file, lambda: sized.read_sized(name, offset, buffers))
        return self._surely(file, lambda: self._storage.read(name, offset, buffers)), None

    def _surely(self, file: FileReport, read: Callable[[], T]) -> T:
        try:
            return read_surely(self._storage, self.name_of(file), read)
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

    def name_of(self, file: FileReport) -> str:
        """Returns the name of one of the item's files in the store."""
        return join(self._step_dir, file.name)

    def _path(self, file: FileReport) -> str:
        return join(self._storage.root, self.name_of(file))

    def _corrupt(self, file: FileReport, text: str, leaf: str = "") -> Corrupt:
        path = self._path(file)
        return Corrupt(f"{path}: {text}", path=path, file=path, leaf=leaf)

    def _hostile(self, file: FileReport, text: str) -> HostileCheckpoint:
        return HostileCheckpoint.at(self._path(file), text)


class _Scratch(threading.local):
    """One buffer a thread, used again: fresh memory costs more than the checksum."""

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(bytearray(nbytes))

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Returns the buffer: see Destination."""
        return [self._memory[: stop - start]]

    def deliver(self) -> None:
        """Keeps nothing."""


class _Together:
    """Memory for small chunks that are read together.

    They begin as far behind a multiple of 64 as in the file.
    """

    def __init__(self, group: Sequence[ChunkRead], allocate: Allocate) -> None:
        self._group = group
        start = group[0].entry.start
        self._origin = start - start % 64
        self._memory: Any = allocate(_end(group[-1]) - self._origin)

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Returns the bytes of a range: see Destination."""
        return [memoryview(self._memory)[start - self._origin : stop - self._origin]]

    def deliver(self) -> None:
        """Makes arrays of the memory of what is whole, and copies the rest."""
        for chunk in self._group:
            start = chunk.entry.start - self._origin
            data = self._memory[start : start + chunk.entry.nbytes]
            if chunk.is_whole and chunk.reads[0].array is None:
                chunk.reads[0].lie_in(data)
            else:
                _deliver(chunk, data)


class _Apart:
    """Where what is needed of a large chunk goes: if it is one stretch, straight to its array.

    It is read in so many ranges, in any order and on any threads; the last that ends delivers it.
    """

    def __init__(self, chunk: ChunkRead, ranges: int) -> None:
        self._chunk = chunk
        self._start, self._stop = _checked_range([chunk])
        self._lock = threading.Lock()
        self._left = ranges
        self._data: HostArray | None = None
        self._is_straight = False
        self._buffers: list[memoryview] = []  # memory of its own is taken with the first range

    def buffers(self, start: int, stop: int) -> list[memoryview]:
        """Returns the bytes of a range: see Destination."""
        with self._lock:
            if not self._buffers:
                self._open()
            return cut(self._buffers, start - self._start, stop - self._start)

    def _open(self) -> None:
        chunk = self._chunk
        data: Any = _straight(chunk)
        self._is_straight = data is not None
        if data is None:
            data = np.empty(chunk.nbytes, np.uint8)
        self._data = data
        needed = chunk.entry.start + chunk.first
        lead = bytearray(needed - self._start)
        tail = bytearray(self._stop - needed - data.nbytes)
        self._buffers = [memoryview(part) for part in (lead, data, tail)]

    def deliver(self) -> None:
        """Copies what has not been read straight, once all is there."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        assert self._data is not None
        if not self._is_straight or len(self._chunk.reads) > 1:
            _deliver(self._chunk, self._data, skip_straight=self._is_straight)
        self._data = None
        self._buffers = []


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
    row_bytes = math.prod(shape_of(region[axis + 1 :])) * itemsize
    stretches: list[tuple[int, int, list[ReadRequest]]] = []
    for read in sorted(reads, key=lambda read: read.region[axis]):
        start, stop = overlap(region, read.region)[axis]
        if stretches and (start - stretches[-1][1]) * row_bytes < 2 * PREFIX_BYTES:
            begin, end, users = stretches.pop()
            stretches.append((begin, max(end, stop), [*users, read]))
        else:
            stretches.append((start, stop, [read]))
    for start, stop, users in stretches:
        rows = (*region[:axis], (start, stop), *region[axis + 1 :])
        if stop - start > 1:
            yield rows, users
        else:
            yield from _rows_of(rows, users, itemsize)


def _checked_range(group: Sequence[ChunkRead]) -> tuple[int, int]:
    """Returns the range of a file, around the needed bytes of a group, that has checksums."""
    first = group[0]
    begin = first.entry.start
    if not first.entry.checksum.prefixes:
        return begin, _end(group[-1])
    start = first.first // PREFIX_BYTES * PREFIX_BYTES
    stop = -(-(first.first + first.nbytes) // PREFIX_BYTES) * PREFIX_BYTES
    return begin + start, begin + min(stop, first.entry.nbytes)


def cut(buffers: Iterable[memoryview], start: int, stop: int) -> list[memoryview]:
    """Returns the pieces of buffers, as if they were one, from `start` to `stop`."""
    pieces = []
    at = 0
    for buffer in buffers:
        raw = buffer.cast("B") if buffer.nbytes else buffer
        piece = raw[max(0, start - at) : max(0, stop - at)]
        if piece.nbytes:
            pieces.append(piece)
        at += raw.nbytes
    return pieces


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


def _straight(chunk: ChunkRead) -> HostArray | None:
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
    offset = 0
    for (start, stop), (first, last) in zip(region, whole, strict=True):
        if start < first or stop > last or (split and (start, stop) != (first, last)):
            return None
        split = split or stop - start > 1
        offset = offset * (last - first) + start - first
    return offset


def _deliver(chunk: ChunkRead, data: HostArray, *, skip_straight: bool = False) -> None:
    """Copies what each request needs of a chunk."""
    array = data.view(chunk.leaf.numpy_dtype).reshape(shape_of(chunk.region))
    for read in chunk.reads:
        if skip_straight and _offset_in(chunk.region, read.region) is not None:
            skip_straight = False
            continue
        assert read.array is not None
        common = overlap(chunk.region, read.region)
        read.array[slices_in(common, read.region)] = array[slices_in(common, chunk.region)]

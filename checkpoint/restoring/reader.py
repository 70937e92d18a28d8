"""Reads chunks of one item, verified: coalesced ranges, side by side, into aligned memory."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from crc32c import crc32c

from ..errors import Corrupt, HostileCheckpoint, StepGone
from ..format.dtypes import dtype_named, stored_as
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


@dataclass(eq=False, slots=True)
class ReadRequest:
    """A region of a leaf as one array: None until its bytes are there."""

    leaf: LeafRecord
    region: Region
    array: np.ndarray[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @property
    def nbytes(self) -> int:
        dtype = dtype_named(self.leaf.dtype)
        assert dtype is not None
        return math.prod(self.shape) * dtype.itemsize


class ArrayReader(Protocol):
    """Is what a restore asks of a reader: see `ItemReader.fill`. Readers of other layouts have it too."""

    def fill(self, targets: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> None: ...


@dataclass(eq=False, slots=True)
class ChunkRead:
    """A chunk that is needed, and the targets that need some of it."""

    leaf: LeafRecord
    region: Region
    stored: ChunkEntry
    targets: list[ReadRequest] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.targets) == 1 and self.targets[0].region == self.region

    @property
    def is_small(self) -> bool:
        return self.stored.nbytes < LARGE_BYTES


class _CellShape(NamedTuple):
    region: Region
    suffix: str  # of the chunk's name, after the leaf's path
    stored: tuple[str, tuple[int, ...], int]  # dtype, shape and bytes as a pack's header tells them


class ItemReader:
    """Reads one item of one step; used by one restore, from one thread."""

    def __init__(self, storage: Storage, step_dir: str, item: ItemRecord) -> None:
        self._storage, self._step_dir, self._item = storage, step_dir, item
        self._headers: dict[int, dict[str, ChunkEntry]] = {}
        self._shapes: dict[tuple[Any, ...], _CellShape] = {}

    def fill(self, targets: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> None:
        """Gives every target its array. `allocate` makes 64-aligned memory of so many bytes.

        Raises Corrupt naming file and leaf, HostileCheckpoint, or StepGone.
        """
        pieces = self._pieces(targets)
        brought = {id(piece.targets[0]) for found in pieces.values() for piece in found if piece.is_whole and piece.is_small}
        for target in targets:
            if id(target) not in brought:
                target.array = _as_array(target, allocate(target.nbytes))
        units = [(file, unit) for file, found in sorted(pieces.items()) for unit in _units(found)]
        work = [(file, unit, allocate(_span(unit)) if unit[0].is_small else None) for file, unit in units]
        run_side_by_side(lambda args: self._read(*args), work, self._storage.max_concurrency)

    def _pieces(self, targets: Iterable[ReadRequest]) -> dict[int, list[ChunkRead]]:
        """Returns what must be read, by file, in the order of the file."""
        needed: dict[tuple[int, int], tuple[LeafRecord, int, list[ReadRequest]]] = {}
        for target in targets:
            leaf = target.leaf
            assert leaf.files is not None
            for cell in _cells(target) if target.nbytes else ():
                key = (id(leaf), cell)
                if key in needed:
                    needed[key][2].append(target)
                else:
                    needed[key] = (leaf, int(leaf.files[cell]), [target])
        self.load_headers({file for _, file, _ in needed.values()})
        found: dict[int, list[ChunkRead]] = {}
        for (_, cell), (leaf, file, users) in needed.items():
            found.setdefault(file, []).append(self.piece(leaf, cell, file, users))
        for pieces in found.values():
            pieces.sort(key=_place)
        return found

    def piece(self, leaf: LeafRecord, cell: int, file: int, targets: list[ReadRequest]) -> ChunkRead:
        """Returns one chunk, having checked that the pack tells of it as the record does."""
        shape = self._shape(leaf, cell)
        stored = self._headers[file].get(leaf.path + shape.suffix)
        if stored is None or (stored.dtype, stored.shape, stored.nbytes) != shape.stored:
            path, name = self._path(self._item.files[file]), leaf.path + shape.suffix
            if stored is None:
                raise Corrupt(f"{path}: the chunk {name!r} is not in this pack", path=path, file=path, leaf=leaf.path)
            told = f"{shape.stored[0]}{list(shape.stored[1])}"
            message = f"{path}: the chunk {name!r} is {stored.dtype}{list(stored.shape)}, the record says {told}"
            raise HostileCheckpoint(message, path=path, file=path)
        return ChunkRead(leaf, shape.region, stored, targets)

    def _shape(self, leaf: LeafRecord, cell: int) -> _CellShape:
        """Returns what the same cell of leaves of one dtype and grid has in common."""
        key = (leaf.dtype, id(leaf.grid), cell)
        found = self._shapes.get(key)
        if found is None:
            dtype = dtype_named(leaf.dtype)
            assert leaf.grid is not None and dtype is not None
            region = leaf.grid.region(cell)
            shape = tuple(stop - start for start, stop in region)
            stored = (*stored_as(dtype, shape), math.prod(shape) * dtype.itemsize)
            found = self._shapes[key] = _CellShape(region, chunk_name("", region, leaf.shape), stored)
        return found

    def check_all(self) -> None:
        """Reads every chunk of every leaf, several at a time, and keeps none; the headers must tell of these chunks and no others."""
        self.load_headers(range(len(self._item.files)))
        pieces: dict[int, list[ChunkRead]] = {}
        for leaf in self._item.leaves:
            for cell, file in enumerate(leaf.files if leaf.files is not None else ()):
                pieces.setdefault(int(file), []).append(self.piece(leaf, cell, int(file), []))
        told = sum(map(len, pieces.values()))
        if told != sum(map(len, self._headers.values())):
            path = join(self._storage.root, self._step_dir, self._item.name)
            raise HostileCheckpoint(f"{path}: the packs hold other chunks than the {told} that the record names", path=path, file=path)
        for found in pieces.values():
            found.sort(key=_place)
        units = [(file, unit) for file, found in sorted(pieces.items()) for unit in _units(found)]
        scratch = threading.local()  # one buffer a thread, used again: fresh memory costs more than the checksum
        run_side_by_side(lambda unit: self._check_unit(unit[0], unit[1], scratch), units, self._storage.max_concurrency)

    def _check_unit(self, file: int, unit: Sequence[ChunkRead], scratch: threading.local) -> None:
        report, piece = self._item.files[file], unit[0]
        if not hasattr(scratch, "memory"):
            scratch.memory = memoryview(bytearray(RANGE_BYTES + LARGE_BYTES))
        memory: memoryview = scratch.memory
        if piece.is_small:
            first = piece.stored.start
            self.read_range(report, first, [memory[: _end(unit[-1]) - first]], piece.leaf.path)
            for each in unit:
                self._check(report, each, crc32c(memory[each.stored.start - first : _end(each) - first]))
            return
        crc = 0
        for start in range(0, piece.stored.nbytes, STEP_BYTES):
            part = memory[: min(STEP_BYTES, piece.stored.nbytes - start)]
            self.read_range(report, piece.stored.start + start, [part], piece.leaf.path)
            crc = crc32c(part, crc)
        self._check(report, piece, crc)

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
        """Returns the first bytes of a file, whose checksum is in the record, having looked that the file has the size that it should."""
        path, data = self._path(file), bytearray(size)
        self.read_range(file, 0, [memoryview(data)])
        if crc32c(data) != file.crc:
            part = "header" if file.head else "file"
            raise Corrupt(f"{path}: the checksum of the {part} does not fit; its bytes are not what was written", path=path, file=path)
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
                self._storage.fetch(join(self._step_dir, RECORD_NAME), 1 << 30)
            except FileNotFoundError:
                raise StepGone(f"{path}: the step was deleted while it was being read", path=path) from error
            raise Corrupt(f"{path}: the file is missing, and the record names it", path=path, file=path) from error
        except (IsADirectoryError, NotADirectoryError) as error:
            path = self._path(file)
            raise Corrupt(f"{path}: this is not a file: {error.strerror}", path=path, file=path) from error

    def _path(self, file: FileReport) -> str:
        return join(self._storage.root, self._step_dir, file.name)

    def _read(self, file: int, unit: Sequence[ChunkRead], memory: np.ndarray[Any, Any] | None) -> None:
        report, piece = self._item.files[file], unit[0]
        if memory is not None:
            self._read_small(report, unit, memory)
            return
        straight = _straight(piece)
        data: Any = straight if straight is not None else np.empty(piece.stored.nbytes, np.uint8)
        crc = 0
        for start in range(0, data.nbytes, STEP_BYTES):
            part = memoryview(data[start : start + STEP_BYTES])
            self.read_range(report, piece.stored.start + start, [part], piece.leaf.path)
            crc = crc32c(part, crc)
        self._check(report, piece, crc)
        _deliver(piece, data, skip_straight=straight is not None)

    def _read_small(self, report: FileReport, unit: Sequence[ChunkRead], memory: Any) -> None:
        first = unit[0].stored.start
        lead = first % 64
        self.read_range(report, first, [memoryview(memory)[lead:]], unit[0].leaf.path)
        for piece in unit:
            start = lead + piece.stored.start - first
            data = memory[start : start + piece.stored.nbytes]
            self._check(report, piece, crc32c(data))
            if piece.is_whole and piece.targets[0].array is None:
                piece.targets[0].array = _as_array(piece.targets[0], data)
            else:
                _deliver(piece, data)

    def _check(self, file: FileReport, piece: ChunkRead, crc: int) -> None:
        if crc != piece.stored.crc:
            path, leaf = self._path(file), piece.leaf.path
            name = chunk_name(leaf, piece.region, piece.leaf.shape)
            message = f"{path}: the checksum of {name!r} does not fit: its bytes are not what was written (leaf {leaf!r})"
            raise Corrupt(message, path=path, file=path, leaf=leaf)


def _cells(target: ReadRequest) -> Iterable[int]:
    """Returns the cells of the leaf's grid that a region touches."""
    grid = target.leaf.grid
    assert grid is not None
    if grid.num_chunks == 1:
        return (0,)
    spans = []
    for axis, (start, stop) in enumerate(target.region):
        starts = grid.starts(axis)
        spans.append(range(int(np.searchsorted(starts, start, "right")) - 1, int(np.searchsorted(starts, stop, "left"))))
    strides = [math.prod(grid.counts[axis + 1 :]) for axis in range(len(spans))]
    return [sum(map(int.__mul__, index, strides)) for index in itertools.product(*spans)]


def _units(pieces: Sequence[ChunkRead]) -> Iterable[list[ChunkRead]]:
    """Groups small chunks that lie near each other; each large one stands alone."""
    unit: list[ChunkRead] = []
    for piece in pieces:
        if not piece.is_small:
            yield [piece]
            continue
        if unit and (piece.stored.start - _end(unit[-1]) > GAP_BYTES or _end(piece) - unit[0].stored.start > RANGE_BYTES):
            yield unit
            unit = []
        unit.append(piece)
    if unit:
        yield unit


def _place(piece: ChunkRead) -> tuple[int, int]:
    """Sorts by place in the file; of two chunks that begin alike the first is empty."""
    return piece.stored.start, piece.stored.nbytes


def _end(piece: ChunkRead) -> int:
    return piece.stored.start + piece.stored.nbytes


def _span(unit: Sequence[ChunkRead]) -> int:
    """Returns the bytes of memory for small chunks, which begin as far behind a multiple of 64 as in the file."""
    return unit[0].stored.start % 64 + _end(unit[-1]) - unit[0].stored.start


def _straight(piece: ChunkRead) -> np.ndarray[Any, Any] | None:
    """Returns the bytes of a target where all of a chunk goes in one stretch, or None."""
    for target in piece.targets:
        offset = _offset_in(piece.region, target)
        if offset is not None and target.array is not None:
            return target.array.reshape(-1).view(np.uint8)[offset : offset + piece.stored.nbytes]
    return None


def _offset_in(region: Region, target: ReadRequest) -> int | None:
    """Returns where in a target's bytes a region lies in one stretch, or None."""
    split = False
    for (start, stop), (first, last) in zip(region, target.region, strict=True):
        if start < first or stop > last or (split and (start, stop) != (first, last)):
            return None
        split = split or stop - start > 1
    offset = 0
    for (start, _), (first, last) in zip(region, target.region, strict=True):
        offset = offset * (last - first) + start - first
    dtype = dtype_named(target.leaf.dtype)
    assert dtype is not None
    return offset * dtype.itemsize


def _deliver(piece: ChunkRead, data: np.ndarray[Any, Any], *, skip_straight: bool = False) -> None:
    """Copies what each target needs of a chunk."""
    dtype = dtype_named(piece.leaf.dtype)
    assert dtype is not None
    source = data.view(dtype).reshape([stop - start for start, stop in piece.region])
    for target in piece.targets:
        if skip_straight and _offset_in(piece.region, target) is not None:
            skip_straight = False
            continue
        assert target.array is not None
        bounds = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.region, target.region, strict=True)]
        into = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(bounds, target.region, strict=True))
        of = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(bounds, piece.region, strict=True))
        target.array[into] = source[of]


def _as_array(target: ReadRequest, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    dtype = dtype_named(target.leaf.dtype)
    assert dtype is not None
    return memory.view(dtype).reshape(target.shape)

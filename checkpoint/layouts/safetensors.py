"""Plain safetensors: one file or a folder of shards with an index, as Hugging Face lays models out. Read by ranges, written whole.

The format: 8 bytes, little-endian, the length of a JSON header; the header, {name: {"dtype", "shape", "data_offsets"}} and an optional
"__metadata__" of strings; then the data, without holes. Nothing here needs the safetensors library.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import Corrupt, HostileCheckpoint, StepNotFound
from ..format.record import ItemRecord, LeafRecord
from ..restoring.reader import ReadRequest
from ..restoring.restore import VerifyReport
from ..storage.base import Entry
from ..storage.path import StorePath
from .base import Info, array_record, find, verify_by_reading

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
MAX_RANK = 32
SHARD_BYTES = 5 << 30  # Hugging Face's usual size of a shard
RANGE_BYTES = 16 << 20  # the most that one thread reads at once
THREADS = 4

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: where its bytes begin in the file, and what they are."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Job:
    """One read: bytes of a file, from `offset` on, into `buffer`."""

    leaf: str
    file: str
    offset: int
    buffer: memoryview


@dataclass
class ReadCounter:
    """Counts what a source has asked its store for."""

    calls: int = 0
    bytes: int = 0


class SafetensorsLayout:
    """Is a folder of safetensors files that is none of ours."""

    name = "safetensors"

    def recognises(self, place: StorePath, names: Mapping[str, Entry]) -> bool:
        return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)

    def open(self, place: StorePath) -> SafetensorsSource:
        return SafetensorsSource(place)

    def step_of(self, name: str) -> int | None:
        return int(name) if name.isascii() and name.isdigit() else None


class SafetensorsSource:
    """Is one file, or one folder of files, as one flat item, "state": {tensor's name: leaf}. `read` may be called from several threads.

    `counter` says how many bytes of tensors were read.
    """

    def __init__(self, place: StorePath, file: str | None = None) -> None:
        self._place = place
        self.counter = ReadCounter()
        self._tensors: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        sizes = place.names()
        for name in [file] if file else _files_of(place, sizes):
            if name not in sizes:
                raise Corrupt(f"{place}/{name} is missing: {INDEX} says that tensors are in it", file=f"{place}/{name}")
            self._add(name, sizes[name].size if "://" not in place.storage.root else None)  # listings of objects tell no sizes
        self.info = Info("safetensors", str(place), {"state": "tree"}, metadata=self._metadata or None)

    def _add(self, name: str, size: int | None) -> None:
        tensors, metadata = read_header(self._place, name, size)
        twice = self._tensors.keys() & tensors.keys()
        if twice:
            found = min(twice)
            message = f"'{found}' is both in {self._tensors[found].file} and in {name} of {self._place}; only one can be meant"
            raise Corrupt(message, file=f"{self._place}/{name}", leaf=found)
        self._tensors |= tensors
        self._metadata |= metadata

    def item(self, name: str) -> ItemRecord:
        find(self.info, self.info.items, name)
        names = sorted(self._tensors)
        tensors = [self._tensors[name] for name in names]
        leaves = tuple(_leaf(name, t) for name, t in zip(names, tensors, strict=True))
        return ItemRecord("state", "tree", (), {"kind": "dict", "keys": names, "nodes": list(range(len(names)))}, leaves)

    def reader(self, name: str) -> SafetensorsReader:
        find(self.info, self.info.items, name)
        return SafetensorsReader(self, self._tensors)

    def json(self, name: str) -> Any:
        raise StepNotFound(f"{self._place} has no JSON item '{name}'", path=str(self._place))

    def verify(self) -> VerifyReport:
        return verify_by_reading(self, len({tensor.file for tensor in self._tensors.values()}))

    def read(self, jobs: Sequence[Job]) -> None:
        """Does reads side by side; raises Corrupt naming file and leaf when a file ends early."""
        self.counter.calls += len(jobs)
        self.counter.bytes += sum(len(job.buffer) for job in jobs)
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(self._read_all, [jobs[i::THREADS] for i in range(THREADS)]):
                pass

    def _read_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            got = self._place.read(job.file, job.offset, [job.buffer])
            if got != len(job.buffer):
                path = f"{self._place}/{job.file}"
                message = f"{path} ends {len(job.buffer) - got} bytes before '{job.leaf}' does: it was cut off"
                raise Corrupt(message, file=path, leaf=job.leaf)


def _leaf(name: str, tensor: Tensor) -> LeafRecord:
    return array_record(name, "array", tensor.shape, tensor.dtype.name, unit=tuple(min(1, size) for size in tensor.shape))


class SafetensorsReader:
    """Fills regions of tensors, asking for no byte that is not in one of them."""

    def __init__(self, source: SafetensorsSource, tensors: Mapping[str, Tensor]) -> None:
        self._source, self._tensors = source, tensors

    def fill(self, targets: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> None:
        """Gives every target its array: see `ItemReader.fill`."""
        jobs: list[Job] = []
        for target in targets:
            tensor = self._tensors[target.leaf.path]
            memory = allocate(target.nbytes)
            target.array = memory.view(tensor.dtype).reshape(target.shape)
            flat, done = memory.data, 0
            for start, length in runs(tensor.shape, target.region, tensor.dtype.itemsize) if target.nbytes else ():
                for piece in range(0, length, RANGE_BYTES):
                    size = min(RANGE_BYTES, length - piece)
                    jobs.append(Job(target.leaf.path, tensor.file, tensor.start + start + piece, flat[done : done + size]))
                    done += size
        self._source.read(jobs)


def _files_of(place: StorePath, names: Mapping[str, Entry]) -> list[str]:
    """Returns the files that make up a model: those of the index, or all there are."""
    index = next((name for name in sorted(names) if name.endswith(".safetensors.index.json")), None)
    if index is None:
        return [name for name in sorted(names) if name.endswith(".safetensors")]
    path = f"{place}/{index}"
    with _damaged(path):
        found = sorted(set(json.loads(place.fetch(index))["weight_map"].values()))
        if any(not isinstance(name, str) or "/" in name or name in ("", ".", "..") for name in found):
            raise HostileCheckpoint(f"{path} names files that are not in its own folder", file=path)
    return found


def read_header(place: StorePath, name: str, size: int | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads and checks the header of one file of `size` bytes (None: not known); returns its tensors and its `__metadata__`.

    Raises Corrupt for a file that is cut off or no safetensors, HostileCheckpoint for one that no writer makes.
    """
    path = f"{place}/{name}"
    head = bytearray(8)
    if place.read(name, 0, [memoryview(head)]) < 8:
        raise Corrupt(f"{path} is no safetensors file: it has less than 8 bytes", file=path)
    (length,) = struct.unpack("<Q", head)
    if length > MAX_HEADER_BYTES:
        raise HostileCheckpoint(f"{path} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read", file=path)
    if size is not None and 8 + length > size:
        raise Corrupt(f"{path} is cut off: its header alone takes {8 + length} bytes, the file has {size}", file=path)
    data = bytearray(length)
    place.read(name, 8, [memoryview(data)])
    with _damaged(path):
        header = json.loads(bytes(data))
        metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
        tensors = {key: _tensor(path, key, value, name, 8 + length, size) for key, value in header.items()}
    return tensors, metadata


def _tensor(path: str, key: str, value: Any, file: str, base: int, size: int | None) -> Tensor:
    tag = value["dtype"]
    if tag not in DTYPES:
        raise Corrupt(f"{path} has '{key}' as {tag}, a dtype that numpy and jax do not have", file=path, leaf=key)
    shape = tuple(int(n) for n in value["shape"])
    begin, end = (int(n) for n in value["data_offsets"])
    if len(shape) > MAX_RANK or min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * DTYPES[tag].itemsize:
        raise HostileCheckpoint(f"{path} gives '{key}' {end - begin} bytes for the shape {shape} of {tag}", file=path)
    if size is not None and base + end > size:
        raise Corrupt(f"{path} is cut off: '{key}' ends at byte {base + end}, the file has {size}", file=path, leaf=key)
    return Tensor(file, base + begin, shape, DTYPES[tag])


@contextlib.contextmanager
def _damaged(path: str) -> Iterator[None]:
    """Says that a header or index is damaged, whatever goes wrong in taking it apart."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path} is damaged: what should describe its tensors does not ({error!r:.200})", file=path) from None


def runs(shape: Sequence[int], region: Sequence[tuple[int, int]], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) in bytes of each contiguous run of a region of a C-ordered array, in the region's own order."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    inner = len(shape)  # the axes from here on are whole
    while inner and tuple(region[inner - 1]) == (0, shape[inner - 1]):
        inner -= 1
    if not inner:
        yield 0, math.prod(shape) * itemsize
        return
    first, stop = region[inner - 1]
    for position in np.ndindex(*(stop - start for start, stop in region[: inner - 1])):
        outer = sum((at + start) * stride for at, (start, _), stride in zip(position, region, strides, strict=False))
        yield outer + first * strides[inner - 1], (stop - first) * strides[inner - 1]


def header_of(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Returns the head of a file (its length included) and the order of the data: by falling item size, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        shape, dtype = tensors[name]
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % 64 + 56)  # the data begins at a multiple of 64
    return struct.pack("<Q", len(data)) + data, order


def split_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Returns names in shards of at most `shard_bytes`, in order; a larger tensor has a shard of its own."""
    shards: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not shards or (used + size > shard_bytes and used):
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards

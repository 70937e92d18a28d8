"""Plain safetensors: one file, or a folder of shards with an index, as Hugging Face has models.

They are read by ranges and written whole. The format: 8 bytes, little-endian, the length of a JSON
header; the header, {name: {"dtype", "shape", "data_offsets"}} and an optional "__metadata__" of
strings; then the data, without holes. Nothing here needs the safetensors library.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays.dtypes import SAFETENSORS_NAMES, dtype_named
from ..errors import Corrupt, HostileCheckpoint, StepNotFound
from ..format.limits import HEADER_LIMIT_BYTES
from ..format.pack_header import ALIGN_BYTES
from ..format.record import ItemRecord, LeafRecord
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import Allocate, ReadRequest
from ..restoring.restore import VerifyReport
from ..storage.base import Entry
from ..storage.path import StorePath
from ..storage.threads import run_side_by_side
from .base import CheckpointInfo, array_record, find_named, verify_by_reading

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_RANK = 32
INDEX_SUFFIX = ".safetensors.index.json"
BESIDE = "files"  # the item of what lies beside the tensors
SHARD_BYTES = 5 << 30  # Hugging Face's usual size of a shard
RANGE_BYTES = 16 << 20  # the most that one thread reads at once
# The same weights in other forms: the safetensors files travel, and no second copy of them.
OTHER_WEIGHTS = (
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "flax_model*.msgpack",
    "flax_model*.msgpack.index.json",
    "tf_model*.h5",
    "tf_model*.h5.index.json",
    "consolidated*.pth",
    "*.gguf",
)
THREADS = 4

DTYPES: Mapping[str, np.dtype[Any]] = {
    **{
        name: dtype
        for stored, name in SAFETENSORS_NAMES.items()
        if (dtype := dtype_named(stored)) is not None
    },
    # These are of later versions: our own packs have them as bytes.
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: where its bytes begin in the file, and what they are."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class RangeRead:
    """One read: bytes of a file, from `offset` on, into `buffer`."""

    leaf: str
    file: str
    offset: int
    buffer: memoryview


@dataclass
class ReadCounter:
    """Counts what a checkpoint has asked its store for."""

    calls: int = 0
    bytes: int = 0

    def add(self, ranges: Sequence[RangeRead]) -> None:
        """Counts reads."""
        self.calls += len(ranges)
        self.bytes += sum(len(each.buffer) for each in ranges)


class SafetensorsLayout:
    """A folder of safetensors files that is none of ours."""

    name = "safetensors"

    def recognises(self, folder: StorePath, names: Mapping[str, Entry]) -> bool:
        return any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names)

    def open(self, folder: StorePath) -> SafetensorsCheckpoint:
        return SafetensorsCheckpoint(folder)

    def step_of(self, name: str) -> int | None:
        return int(name) if name.isascii() and name.isdigit() else None


class SafetensorsCheckpoint:
    """One file, or one folder of files, as one flat item, "state": {tensor's name: leaf}.

    What lies beside the files of a folder (config, tokenizer, the index of the shards) is an item
    of files, "files".

    `read` may be called from several threads. `counter` says how many bytes of tensors were read.
    """

    def __init__(self, folder: StorePath, file: str | None = None) -> None:
        self._folder = folder
        self.counter = ReadCounter()
        self._tensors: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        sizes = folder.names()
        self._beside = [] if file else _names_beside(folder, sizes)
        for name in [file] if file else _files_of(folder, sizes):
            if name not in sizes:
                raise Corrupt(
                    f"{folder}/{name} is missing: {INDEX} says that tensors are in it",
                    file=f"{folder}/{name}",
                )
            self._add(name, sizes[name].size)
        items = {"state": "tree"}
        if self._beside:
            items[BESIDE] = "files"
        self.info = CheckpointInfo(
            "safetensors", str(folder), items, metadata=self._metadata or None
        )

    def _add(self, name: str, size: int | None) -> None:
        tensors, metadata = read_header(self._folder, name, size)
        twice = sorted(self._tensors.keys() & tensors.keys())
        if twice:
            message = (
                f"'{twice[0]}' is both in {self._tensors[twice[0]].file} and in {name} of"
                f" {self._folder}; only one can be meant"
            )
            raise Corrupt(message, file=f"{self._folder}/{name}", leaf=twice[0])
        self._tensors |= tensors
        self._metadata |= metadata

    def item(self, name: str) -> ItemRecord:
        self._check_tree(name)
        names = sorted(self._tensors)
        tree = {"kind": "dict", "keys": names, "nodes": list(range(len(names)))}
        leaves = [_leaf(name, self._tensors[name]) for name in names]
        return ItemRecord("state", "tree", (), tree, tuple(leaves))

    def reader(self, name: str) -> SafetensorsArrays:
        self._check_tree(name)
        return SafetensorsArrays(self, self._tensors)

    def _check_tree(self, name: str) -> None:
        trees = [each for each, kind in self.info.items.items() if kind == "tree"]
        find_named(self.info, dict.fromkeys(trees), name)

    def json(self, name: str, process: int = 0) -> Any:
        raise StepNotFound(f"{self._folder} has no JSON item '{name}'", path=str(self._folder))

    def files(
        self, name: str, selection: PerProcessSelection | None = None
    ) -> Iterator[tuple[str, Iterator[memoryview]]]:
        if name not in self.info.items or name != BESIDE:
            raise StepNotFound(
                f"{self._folder} has no item of files '{name}'", path=str(self._folder)
            )
        for own in self._beside:
            yield own, self._pieces(own)

    def _pieces(self, name: str) -> Iterator[memoryview]:
        memory = memoryview(bytearray(RANGE_BYTES))
        offset = 0
        while got := self._folder.read(name, offset, [memory]):
            yield memory[:got]
            offset += got

    def verify(self) -> VerifyReport:
        return verify_by_reading(self, len({tensor.file for tensor in self._tensors.values()}))

    def read(self, ranges: Sequence[RangeRead]) -> None:
        """Does reads side by side; raises Corrupt naming file and leaf when a file ends early."""
        self.counter.add(ranges)
        shares = [ranges[first::THREADS] for first in range(THREADS)]
        run_side_by_side(self._read_all, shares, THREADS)

    def _read_all(self, ranges: Sequence[RangeRead]) -> None:
        for each in ranges:
            got = self._folder.read(each.file, each.offset, [each.buffer])
            if got != len(each.buffer):
                path = f"{self._folder}/{each.file}"
                message = (
                    f"{path} ends {len(each.buffer) - got} bytes before '{each.leaf}' does: it was"
                    " cut off"
                )
                raise Corrupt(message, file=path, leaf=each.leaf)


def _leaf(name: str, tensor: Tensor) -> LeafRecord:
    single = tuple(min(1, size) for size in tensor.shape)
    return array_record(name, "array", tensor.shape, tensor.dtype.name, chunk_shape=single)


class SafetensorsArrays:
    """Fills regions of tensors, asking for no byte that is not in one of them."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, tensors: Mapping[str, Tensor]) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        ranges: list[RangeRead] = []
        for read in reads:
            tensor = self._tensors[read.leaf.path]
            memory = allocate(read.nbytes)
            read.lie_in(memory)
            if read.nbytes:
                ranges += _ranges_of(read, tensor, memory.data)
        self._checkpoint.read(ranges)


def _ranges_of(read: ReadRequest, tensor: Tensor, memory: memoryview) -> Iterator[RangeRead]:
    """Yields the reads that fill a request's memory."""
    done = 0
    for start, length in runs(tensor.shape, read.region, tensor.dtype.itemsize):
        for at in range(0, length, RANGE_BYTES):
            size = min(RANGE_BYTES, length - at)
            offset = tensor.start + start + at
            yield RangeRead(read.leaf.path, tensor.file, offset, memory[done : done + size])
            done += size


def _files_of(folder: StorePath, names: Mapping[str, Entry]) -> list[str]:
    """Returns the files that make up a model: those of the index, or all there are."""
    index = next((name for name in sorted(names) if name.endswith(INDEX_SUFFIX)), None)
    if index is None:
        return [name for name in sorted(names) if name.endswith(".safetensors")]
    path = f"{folder}/{index}"
    with _damaged(path):
        files = sorted(set(json.loads(folder.fetch(index))["weight_map"].values()))
        if not all(isinstance(name, str) and _is_plain(name) for name in files):
            raise HostileCheckpoint(f"{path} names files that are not in its own folder", file=path)
    return files


def _names_beside(folder: StorePath, names: Mapping[str, Entry]) -> list[str]:
    """Returns the names of the files that belong to a model, besides its tensors.

    Those are in the folder and the folders below it, but for hidden ones, for folders that have
    tensors of their own, and for the same weights in other forms.
    """
    files = [name for name in names if not name.endswith("/")]
    if any(name.endswith("/") and not name.startswith(".") for name in names):
        skip = len(folder.name) + 1 if folder.name else 0
        entries = folder.storage.list(folder.name, recursive=True)
        files = [entry.name[skip:] for entry in entries]
    models = {
        name.rpartition("/")[0] for name in files if "/" in name and name.endswith(".safetensors")
    }
    return sorted(name for name in files if _is_beside(name, models))


def _is_beside(name: str, models: Set[str]) -> bool:
    *folders, base = name.split("/")
    above = {"/".join(folders[: depth + 1]) for depth in range(len(folders))}
    return not (
        any(each.startswith(".") for each in (*folders, base))
        or above & models
        or base.endswith(".safetensors")
        or any(fnmatchcase(base, pattern) for pattern in OTHER_WEIGHTS)
    )


def shards_of_index(data: bytes) -> int | None:
    """Returns of how many files an index says that they are; None for what is no index."""
    try:
        return len(set(json.loads(data)["weight_map"].values())) or None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_plain(name: str) -> bool:
    return "/" not in name and name not in ("", ".", "..")


def read_header(
    folder: StorePath, name: str, size: int | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads and checks the header of one file of `size` bytes (None: not known).

    Returns its tensors and its `__metadata__`. Raises Corrupt for a file that is cut off or no
    safetensors, HostileCheckpoint for one that no writer makes.
    """
    path = f"{folder}/{name}"
    head = bytearray(8)
    if folder.read(name, 0, [memoryview(head)]) < 8:
        raise Corrupt(f"{path} is no safetensors file: it has less than 8 bytes", file=path)
    (length,) = struct.unpack("<Q", head)
    if length > HEADER_LIMIT_BYTES:
        raise HostileCheckpoint(
            f"{path} claims a header of {length} bytes; at most {HEADER_LIMIT_BYTES} are read",
            file=path,
        )
    if size is not None and 8 + length > size:
        raise Corrupt(
            f"{path} is cut off: its header alone takes {8 + length} bytes, the file has {size}",
            file=path,
        )
    data = bytearray(length)
    folder.read(name, 8, [memoryview(data)])
    with _damaged(path):
        header = json.loads(bytes(data))
        texts = header.pop("__metadata__", None) or {}
        metadata = {str(key): str(value) for key, value in texts.items()}
        packed = {key: _tensor(path, key, value) for key, value in header.items()}
    tensors = {}
    for key, tensor in packed.items():
        start = 8 + length + tensor.start
        end = start + math.prod(tensor.shape) * tensor.dtype.itemsize
        if size is not None and end > size:
            message = f"{path} is cut off: '{key}' ends at byte {end}, the file has {size}"
            raise Corrupt(message, file=path, leaf=key)
        tensors[key] = replace(tensor, file=name, start=start)
    return tensors, metadata


def _tensor(path: str, key: str, value: Any) -> Tensor:
    """Returns a tensor as a header describes it: it starts within the data of the file."""
    name = value["dtype"]
    if name not in DTYPES:
        raise Corrupt(
            f"{path} has '{key}' as {name}, a dtype that numpy and jax do not have",
            file=path,
            leaf=key,
        )
    shape = tuple(int(n) for n in value["shape"])
    begin, end = (int(n) for n in value["data_offsets"])
    if (
        len(shape) > MAX_RANK
        or min(shape, default=0) < 0
        or begin < 0
        or end - begin != math.prod(shape) * DTYPES[name].itemsize
    ):
        raise HostileCheckpoint(
            f"{path} gives '{key}' {end - begin} bytes for the shape {shape} of {name}", file=path
        )
    return Tensor(path, begin, shape, DTYPES[name])


@contextlib.contextmanager
def _damaged(path: str) -> Iterator[None]:
    """Turns whatever goes wrong in parsing a header or an index into Corrupt."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(
            f"{path} is damaged: what should describe its tensors does not ({error!r:.200})",
            file=path,
        ) from None


def runs(
    shape: Sequence[int], region: Sequence[tuple[int, int]], itemsize: int
) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) in bytes of each run of a region of a C-ordered array.

    A run is contiguous; they come in the region's own order.
    """
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
        outer = sum(
            (at + start) * stride
            for at, (start, _), stride in zip(position, region, strides, strict=False)
        )
        yield outer + first * strides[inner - 1], (stop - first) * strides[inner - 1]


def header_of(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[str]]:
    """Returns the head of a file (its length included) and the order of the data.

    That order is by falling item size, and else the one that is given.
    """
    order = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        shape, dtype = tensors[name]
        size = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-(8 + len(data)) % ALIGN_BYTES)
    return struct.pack("<Q", len(data)) + data, order


def split_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Returns names in shards of at most `shard_bytes`, in order.

    A larger tensor has a shard of its own.
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or (filled + size > shard_bytes and filled):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def split_evenly(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Returns names in so many shards of about the same size, in order; at most one for each."""
    count = min(count, len(sizes))
    shards: list[list[str]] = []
    rest_bytes = sum(sizes.values())
    filled = goal = 0
    for index, (name, size) in enumerate(sizes.items()):
        to_open = count - len(shards)
        is_due = 2 * filled + size > 2 * goal or len(sizes) - index == to_open
        if not shards or (to_open and is_due):
            shards.append([])
            rest_bytes -= filled
            goal = rest_bytes // to_open
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards

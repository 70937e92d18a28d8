"""Plain safetensors: one file, or a folder of shards with an index, as Hugging Face has models.

They are read by ranges and written whole. The format: 8 bytes, little-endian, the length of a JSON
header; the header, {name: {"dtype", "shape", "data_offsets"}} and an optional "__metadata__" of
strings; then the data, without holes. Nothing here needs the safetensors library.

The index of a folder assigns each tensor to a file, and exactly that is read. Other tensors and
files are left out with a warning: they are what an older save or another model left there.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..arrays.dtypes import SAFETENSORS_NAMES, Dtype, HostArray, dtype_named
from ..errors import Corrupt, HostileCheckpoint, StepNotFound
from ..format.grid import Shape
from ..format.limits import HEADER_LIMIT_BYTES, MALFORMED
from ..format.own_files import FileContents
from ..format.record import ItemRecord, LeafRecord
from ..restoring.match import listed
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import Allocate, ReadRequest
from ..restoring.restore import VerifyReport
from ..storage.path import StorePath
from ..storage.threads import run_side_by_side
from .base import (
    CheckpointInfo,
    Entries,
    array_record,
    contents_of,
    files_below,
    find_named,
    parsing,
    verify_by_reading,
)

log = logging.getLogger("holdfast.checkpoint")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_RANK = 32
INDEX_SUFFIX = ".safetensors.index.json"
# A shard's name says of how many it is one.
_SHARD = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors")
BESIDE = "files"  # the item of what lies beside the tensors
SHARD_BYTES = 5 << 30  # Hugging Face's usual size of a shard
RANGE_BYTES = 16 << 20  # the most that one thread reads at once
PACKED_RANGE = 4 << 20  # elements below a byte that are unpacked at once: whole bytes
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

DTYPES: Mapping[str, Dtype] = {
    **{
        name: dtype
        for stored, name in SAFETENSORS_NAMES.items()
        if (dtype := dtype_named(stored)) is not None
    },
    # These are of later versions: our own packs have them as bytes.
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    # A byte has two of these, or three bytes four, the first in the lowest bits.
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PACKED_BITS = {DTYPES["F4"]: 4, DTYPES["F6_E2M3"]: 6, DTYPES["F6_E3M2"]: 6}


def bits_of(dtype: Dtype) -> int:
    """Returns the bits that an element takes in a file: in memory it has at least a byte."""
    return _PACKED_BITS.get(dtype, 8 * dtype.itemsize)


def nbytes_of(shape: Shape, dtype: Dtype) -> int:
    """Returns the bytes that an array takes in a file."""
    return math.prod(shape) * bits_of(dtype) // 8


def unpack(data: bytes | bytearray, bits: int) -> HostArray:
    """Returns elements of so many bits as bytes, one each."""
    spread = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    whole = spread[: spread.size // bits * bits].reshape(-1, bits)
    return np.packbits(whole, axis=1, bitorder="little").reshape(-1)


def pack(elements: HostArray, bits: int) -> HostArray:
    """Returns bytes, one for each element, as they lie in a file: the other way round."""
    spread = np.unpackbits(elements.reshape(-1, 1), axis=1, count=bits, bitorder="little")
    return np.packbits(spread, bitorder="little")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: where its bytes begin in the file, and what they are.

    Of a dtype that numpy lacks, `unread`, it is the bytes.
    """

    file: str
    start: int
    shape: Shape
    dtype: Dtype
    unread: str = ""

    @property
    def stop(self) -> int:
        """Where its bytes end in the file."""
        return self.start + nbytes_of(self.shape, self.dtype)


class RangeRead(NamedTuple):
    """One read: bytes of a file, from `offset` on, into `buffer`, and what is done with them."""

    leaf: str
    file: str
    offset: int
    buffer: memoryview
    then: Callable[[], None] = lambda: None


class SafetensorsLayout:
    """A folder of safetensors files that is none of ours."""

    name = "safetensors"
    keeps_roots = False

    def recognises(self, folder: StorePath, names: Entries) -> bool:
        return any(_is_model(name) or name.endswith(INDEX_SUFFIX) for name in names)

    def open(self, folder: StorePath) -> SafetensorsCheckpoint:
        return SafetensorsCheckpoint(folder)

    def step_of(self, name: str) -> int | None:
        return int(name) if name.isascii() and name.isdigit() else None


class SafetensorsCheckpoint:
    """One file, or one folder of files, as one flat item, "state": {tensor's name: leaf}.

    What lies beside the files of a folder (config, tokenizer, the index of the shards) is an item
    of files, "files".

    `read` may be called from several threads.
    """

    def __init__(self, folder: StorePath, file: str | None = None) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        names = folder.names()
        self._beside = [] if file else names_beside(folder, names)
        index = None if file else _index_among(folder, names)
        if index is None:
            self._add(_unindexed(folder, file, names), names)
        else:
            self._add_indexed(index, names)
        items = {"state": "tree"}
        if self._beside:
            items[BESIDE] = "files"
        path = str(folder) if file is None else f"{folder}/{file}"
        self.info = CheckpointInfo("safetensors", path, items, metadata=self._metadata or None)

    def _add(self, files: Sequence[str], names: Entries) -> None:
        for name in files:
            tensors, metadata = read_header(self._folder, name, names[name].size)
            twice = sorted(self._tensors.keys() & tensors.keys())
            if twice:
                message = (
                    f"'{twice[0]}' is both in {self._tensors[twice[0]].file} and in {name} of"
                    f" {self._folder}; only one can be meant: load one of the files by its path, or"
                    f" write {INDEX}, which says whose it is"
                )
                raise Corrupt(message, file=f"{self._folder}/{name}", leaf=twice[0])
            self._tensors |= tensors
            self._metadata |= metadata

    def _add_indexed(self, index: str, names: Entries) -> None:
        path = f"{self._folder}/{index}"
        assigned: dict[str, list[str]] = {}
        for tensor, name in _read_index(self._folder, index).items():
            assigned.setdefault(name, []).append(tensor)
        left_out = []
        for name, wanted in sorted(assigned.items()):
            promise = f"{path} says that {listed(wanted)} are in {name}"
            if name not in names:
                other = f", or load {self._folder}/{SINGLE} by itself" if SINGLE in names else ""
                raise Corrupt(
                    f"{self._folder}/{name} is missing: {promise}; fetch it again{other}",
                    file=f"{self._folder}/{name}",
                    leaf=wanted[0],
                )
            tensors, metadata = read_header(self._folder, name, names[name].size)
            missing = [tensor for tensor in wanted if tensor not in tensors]
            if missing:
                raise Corrupt(
                    f"{promise}, and {listed(missing)} {'is' if len(missing) == 1 else 'are'} not:"
                    " the index and the file are of two versions; fetch both again, or remove the"
                    " index if the files say it all",
                    file=f"{self._folder}/{name}",
                    leaf=missing[0],
                )
            self._tensors |= {tensor: tensors.pop(tensor) for tensor in wanted}
            self._metadata |= metadata
            left_out += [f"{tensor} in {name}" for tensor in tensors]
        left_out += [name for name in sorted(names) if _is_model(name) and name not in assigned]
        _warn_of_left_out(path, left_out)

    def item(self, name: str) -> ItemRecord:
        tensors = find_named(self.info, {"state": self._tensors}, name)
        names = sorted(tensors)
        tree = {"kind": "dict", "keys": names, "nodes": list(range(len(names)))}
        leaves = tuple(_leaf(each, tensors[each], self._folder) for each in names)
        return ItemRecord("state", "tree", (), tree, leaves)

    def reader(self, name: str) -> SafetensorsCheckpoint:
        return self

    def json(self, name: str, process: int = 0) -> Any:
        return find_named(self.info, {}, name)

    def files(self, name: str, selection: PerProcessSelection | None = None) -> FileContents:
        return contents_of(self._folder, find_named(self.info, {BESIDE: self._beside}, name))

    def verify(self) -> VerifyReport:
        return verify_by_reading(self, len({tensor.file for tensor in self._tensors.values()}))

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array, asking for no byte that is not in one of them: see
        ArrayReader.
        """
        ranges: list[RangeRead] = []
        for read in reads:
            tensor = self._tensors[read.leaf.path]
            memory = allocate(read.nbytes)
            read.lie_in(memory)
            if read.nbytes:
                ranges += _ranges_of(read, tensor, memory.data)
        shares = [ranges[first::THREADS] for first in range(THREADS)]
        run_side_by_side(self._read_all, shares, THREADS)

    def _read_all(self, ranges: Sequence[RangeRead]) -> None:
        """Raises Corrupt, which names file and leaf, where a file ends early."""
        for leaf, file, offset, buffer, then in ranges:
            got = self._folder.read(file, offset, [buffer])
            if got != len(buffer):
                path = f"{self._folder}/{file}"
                message = (
                    f"{path} ends {len(buffer) - got} bytes before '{leaf}' does: it was cut off"
                )
                raise Corrupt(message, file=path, leaf=leaf)
            then()


def _leaf(name: str, tensor: Tensor, folder: StorePath) -> LeafRecord:
    single = tuple(min(1, size) for size in tensor.shape)
    leaf = array_record(name, "array", tensor.shape, tensor.dtype.name, chunk_shape=single)
    if not tensor.unread:
        return leaf
    return replace(
        leaf,
        kind="unreadable",
        impl=tensor.unread,
        refusal=(
            f"{folder}/{tensor.file} has '{name}' as {tensor.unread}, a dtype that numpy and jax do"
            f" not have; leave it out: partial=lambda path: path != {name!r}, or rules={{{name!r}:"
            " Drop()}"
        ),
    )


def _ranges_of(read: ReadRequest, tensor: Tensor, memory: memoryview) -> Iterator[RangeRead]:
    """Yields the reads that fill a request's memory."""
    is_packed = tensor.dtype in _PACKED_BITS
    longest = PACKED_RANGE if is_packed else RANGE_BYTES
    range_of = _packed_range if is_packed else _range
    for start, length in runs(tensor.shape, read.region, tensor.dtype.itemsize):
        for at in range(0, length, longest):
            size = min(longest, length - at)
            yield range_of(read.leaf.path, tensor, start + at, memory[:size])
            memory = memory[size:]


def _range(leaf: str, tensor: Tensor, first: int, memory: memoryview) -> RangeRead:
    return RangeRead(leaf, tensor.file, tensor.start + first, memory)


def _packed_range(leaf: str, tensor: Tensor, first: int, memory: memoryview) -> RangeRead:
    """Returns a read of elements below a byte, from `first` on, which are put into memory then."""
    bits = bits_of(tensor.dtype)
    # From a byte in which an element begins: three bytes of six bits each have four.
    begin = first - first % 4
    offset = begin * bits // 8
    data = bytearray(-(-(first + len(memory)) * bits // 8) - offset)
    return RangeRead(
        leaf,
        tensor.file,
        tensor.start + offset,
        memoryview(data),
        then=partial(_unpack_into, memory, data, bits, first - begin),
    )


def _unpack_into(memory: memoryview, data: bytearray, bits: int, skip: int) -> None:
    elements = unpack(data, bits)[skip : skip + len(memory)]
    memory[:] = elements.data


def _is_model(name: str) -> bool:
    # Hidden ones are of editors and systems: `._model.safetensors`.
    return name.endswith(".safetensors") and not name.startswith(".")


def _index_among(folder: StorePath, names: Collection[str]) -> str | None:
    """Returns the index of a model, None where it has none. Raises Corrupt where several models
    have one, and none is the usual one.
    """
    found = [name for name in sorted(names) if name.endswith(INDEX_SUFFIX)]
    if INDEX in found:
        _warn_of_left_out(f"{folder}/{INDEX}", [name for name in found if name != INDEX])
        return INDEX
    if len(found) > 1:
        raise Corrupt(
            f"{folder} has {len(found)} models, by {listed(found)}: only one can be meant; leave"
            " one index in the folder",
            file=f"{folder}/{found[0]}",
        )
    return found[0] if found else None


def _read_index(folder: StorePath, index: str) -> dict[str, str]:
    """Returns in which file each tensor is. Raises Corrupt, HostileCheckpoint."""
    path = f"{folder}/{index}"
    with parsing(path):
        assigned = dict(json.loads(folder.fetch(index))["weight_map"].items())
        if not all(isinstance(name, str) and _is_plain(name) for name in assigned.values()):
            raise HostileCheckpoint(f"{path} names files that are not in its own folder", file=path)
    if not assigned:
        raise Corrupt(
            f"{path} assigns no tensor to a file: its weight_map is empty; fetch it again, or"
            " remove it, and the files are read as they are",
            file=path,
        )
    return assigned


def _unindexed(folder: StorePath, file: str | None, names: Collection[str]) -> list[str]:
    """Returns the files of a model without an index: `file`, or the usual one, or all there are.

    Raises Corrupt where one of numbered shards is missing, StepNotFound where `file` is.
    """
    files = [name for name in sorted(names) if _is_model(name)]
    if file is not None:
        if file in names:
            return [file]
        raise StepNotFound(
            f"there is no file {folder}/{file}; the folder has"
            f" {listed(files) if files else 'no safetensors files'}",
            path=f"{folder}/{file}",
        )
    if SINGLE in files:
        _warn_of_left_out(f"{folder}/{SINGLE}", [name for name in files if name != SINGLE])
        return [SINGLE]
    _check_shards(folder, files)
    return files


def _check_shards(folder: StorePath, files: Iterable[str]) -> None:
    shards: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, files)):
        shards.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, count), numbers in shards.items():
        if len(numbers) < int(count):
            number = min(set(range(1, int(count) + 1)) - numbers)
            missing = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
            raise Corrupt(
                f"{folder}/{missing} is missing: {len(numbers)} of {int(count)} shards are there;"
                " fetch it again, or load one file by its path",
                file=f"{folder}/{missing}",
            )


def _warn_of_left_out(chosen: str, left_out: Sequence[str]) -> None:
    if left_out:
        log.warning(
            "%s decides what is read; left out: %s. If that is part of the model, fetch the folder"
            " again; a file can be loaded by its own path",
            chosen,
            listed(left_out),
        )


def names_beside(folder: StorePath, names: Entries) -> list[str]:
    """Returns the names of the files that belong to a model, besides its tensors.

    Those are in the folder and the folders below it, but for hidden ones, for folders that have
    tensors of their own, and for the same weights in other forms.
    """
    files = [name for name in names if not name.endswith("/")]
    if any(name.endswith("/") and not name.startswith(".") for name in names):
        files = list(files_below(folder))
    models = {
        name.rpartition("/")[0] for name in files if "/" in name and name.endswith(".safetensors")
    }
    return sorted(name for name in files if _is_beside(name, models))


def files_beside(folder: StorePath) -> FileContents:
    """Returns the files that belong to the model in a folder, besides its tensors: their names and
    their bytes in pieces. Raises StepNotFound where there are none.
    """
    names = names_beside(folder, folder.names())
    if not names:
        raise StepNotFound(
            f"{folder} has no files that could lie beside a model; expected its config or"
            " tokenizer",
            path=str(folder),
        )
    return contents_of(folder, names)


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
    except MALFORMED:
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
    data = _read_json(folder, name, size)
    first = 8 + len(data)
    with parsing(path):
        header = json.loads(data)
        texts = header.pop("__metadata__", None) or {}
        metadata = {str(key): str(value) for key, value in texts.items()}
        tensors = {key: _tensor(path, name, first, key, value) for key, value in header.items()}
    for key, tensor in tensors.items():
        if size is not None and tensor.stop > size:
            message = f"{path} is cut off: '{key}' ends at byte {tensor.stop}, the file has {size}"
            raise Corrupt(message, file=path, leaf=key)
    return tensors, metadata


def _read_json(folder: StorePath, name: str, size: int | None) -> bytes:
    """Returns the header of a file, without its length."""
    path = f"{folder}/{name}"
    head = bytearray(8)
    if folder.read(name, 0, [memoryview(head)]) < 8:
        raise Corrupt(f"{path} is no safetensors file: it has less than 8 bytes", file=path)
    length = int.from_bytes(head, "little")
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
    return bytes(data)


def _tensor(path: str, file: str, first: int, key: str, value: Any) -> Tensor:
    """Returns a tensor as a header describes it; the data of the file begin at byte `first`."""
    name = value["dtype"]
    shape = tuple(int(n) for n in value["shape"])
    begin, end = (int(n) for n in value["data_offsets"])
    dtype = DTYPES.get(name)
    nbits = 8 * (end - begin)
    if (
        len(shape) > MAX_RANK
        or min(shape, default=0) < 0
        or min(begin, nbits) < 0
        or (dtype is not None and nbits != math.prod(shape) * bits_of(dtype))
    ):
        raise HostileCheckpoint(
            f"{path} gives '{key}' {end - begin} bytes for the shape {shape} of {name}", file=path
        )
    if dtype is None:
        data = (end - begin,)
        return Tensor(file, first + begin, data, np.dtype(np.uint8), unread=str(name))
    return Tensor(file, first + begin, shape, dtype)


def runs(
    shape: Sequence[int], region: Sequence[tuple[int, int]], itemsize: int
) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) in bytes of each run of a region of a C-ordered array.

    A run is contiguous; they come in the region's own order.
    """
    inner = len(shape)  # the axes from here on are whole
    while inner and tuple(region[inner - 1]) == (0, shape[inner - 1]):
        inner -= 1
    row = math.prod(shape[inner:]) * itemsize
    if not inner:
        yield 0, row
        return
    *outer, (first, stop) = region[:inner]
    for indices in itertools.product(*(range(*bounds) for bounds in outer)):
        offset = 0
        for index, size in zip(indices, shape[1:], strict=False):
            offset = (offset + index) * size
        yield (offset + first) * row, (stop - first) * row


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

"""Writes what is converted as safetensors: one file, or shards with an index, and files beside."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays.dtypes import Dtype, HostArray, dtype_named
from ..errors import StepExists, UnsupportedLeaf
from ..format.own_files import is_folder_name, own_names, put_files, scratch_folder
from ..format.pack_header import ALIGN_BYTES, HEADER_BYTES
from ..format.record import ItemRecord, LeafRecord
from ..format.tree import plain_name
from ..layouts.base import CheckpointInfo
from ..layouts.safetensors import (
    INDEX,
    INDEX_SUFFIX,
    NAMES,
    SHARD_BYTES,
    SINGLE,
    bits_of,
    files_beside,
    nbytes_of,
    pack,
    shards_of_index,
    split_evenly,
    split_shards,
)
from ..restoring.devices import Region
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import ArrayReader
from ..restoring.view_reader import BATCH_BYTES, ViewReader, Wanted, read_in_order
from ..saving.plan import CHUNK_BYTES
from ..storage.base import Part
from ..storage.path import StorePath
from ..storage.tombstone import RECORD_NAME
from .conversion import Conversion, Progress

_log = logging.getLogger("holdfast.checkpoint")
NewFile: TypeAlias = tuple[str, int, Iterable[Part]]  # its name, its size, its bytes


class _Tensor(NamedTuple):
    """A leaf that becomes a tensor. One that is a value of Python's has no reader."""

    leaf: LeafRecord
    reader: ArrayReader | None
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a file."""
        return nbytes_of(self.leaf.shape, self.dtype)

    def entry(self, offset: int) -> dict[str, Any]:
        """Returns what a header says of it, whose bytes are at an offset of the data."""
        return {
            "dtype": NAMES[self.dtype],
            "shape": list(self.leaf.shape),
            "data_offsets": [offset, offset + self.nbytes],
        }


def to_safetensors(
    conversion: Conversion, folder: StorePath, count: int | None, shard_bytes: int | None
) -> str:
    """Writes the chosen items as one file, or as shards with an index, and files beside them.

    There are `count` files of tensors, or files of `shard_bytes` at most; with neither as many as
    the checkpoint had when it came from safetensors, else files of 5 GiB. Returns where. A large
    leaf is in memory in pieces. Raises StepExists, UnsupportedLeaf.
    """
    there = folder.names()
    if RECORD_NAME in there or any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in there):
        raise StepExists(
            f"{folder} holds a checkpoint already; choose another folder", path=str(folder)
        )
    tensors, texts = _named(conversion)
    with scratch_folder() as scratch:
        _stage_beside(conversion, scratch)
        beside, kept = _staged(scratch, conversion.checkpoint.info.path)
        _check_beside(conversion, folder, beside, there)
        if count is None and shard_bytes is None:
            count = kept
        limit = folder.storage.max_file_bytes
        shards = _split(tensors, count, shard_bytes or SHARD_BYTES, limit)
        files = itertools.chain(
            _tensor_files(shards, texts, conversion.progress),
            (_local_file(scratch, name) for name in beside),
            # The index comes last: with it the folder is whole.
            _index_file(shards),
        )
        _write(folder, files)
    return str(folder)


def _write(folder: StorePath, files: Iterable[NewFile]) -> None:
    """Writes all files, or none."""
    begun: list[str] = []
    try:
        for name, size, parts in files:
            begun.append((folder / name).name)
            folder.storage.write(begun[-1], size, parts)
    except BaseException:
        folder.storage.delete([*begun, *folder.folders_of(begun)])
        raise


# --- what there will be


def _header_texts(info: CheckpointInfo) -> dict[str, str]:
    """Returns what a file's header says of a checkpoint: its metadata, what is no text as JSON."""
    known = info.metadata
    metadata = known if isinstance(known, Mapping) else {"metadata": known}
    texts = {"format": "pt"}
    for name, value in metadata.items() if known is not None else ():
        texts[name] = value if isinstance(value, str) else json.dumps(value)
    if info.step is not None:
        texts["step"] = str(info.step)
    return texts


def _named(conversion: Conversion) -> tuple[dict[str, _Tensor], dict[str, str]]:
    """Returns the tensors by the names that they get, and the texts of the header. Raises
    UnsupportedLeaf for what has no place.
    """
    chosen = conversion.chosen
    about = _header_texts(conversion.checkpoint.info)
    tensors: dict[str, _Tensor] = {}
    texts: dict[str, str] = {}
    for item_name, (item, reader) in chosen.items():
        prefix = f"{item_name}." if len(chosen) > 1 else ""
        for leaf in _in_reading_order(item, reader):
            name = prefix + plain_name(leaf.path)
            if name in tensors or name in texts:
                raise UnsupportedLeaf(
                    f"two leaves would be called '{name}' in a safetensors file; rename one of"
                    " them",
                    leaf=leaf.path,
                )
            if isinstance(leaf.value, str | bytes):
                texts[name] = _text(leaf, about, name)
            elif name == "__metadata__":
                raise UnsupportedLeaf(
                    f"a safetensors file has no array called '{name}': its header is; rename it",
                    leaf=leaf.path,
                )
            else:
                is_value = leaf.grid is None
                tensors[name] = _Tensor(leaf, None if is_value else reader, _dtype(name, leaf))
    return tensors, {**about, **texts}


def _in_reading_order(item: ItemRecord, reader: ArrayReader) -> Sequence[LeafRecord]:
    if not isinstance(reader, ViewReader):
        return item.leaves
    places = {path: place for place, path in enumerate(reader.order)}
    return sorted(item.leaves, key=lambda leaf: places.get(leaf.path, -1))


def _text(leaf: LeafRecord, about: Mapping[str, str], name: str) -> str:
    """Returns a text, or bytes in hexadecimal digits, as the header of a file has them."""
    if name in about:
        raise UnsupportedLeaf(
            f"'{name}' is a text, and the header of a safetensors file says '{name}' of the"
            f" checkpoint: {about[name]!r:.100}; rename the leaf",
            leaf=leaf.path,
        )
    text: str = leaf.value if isinstance(leaf.value, str) else leaf.value.hex()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeaf(
            f"a safetensors file cannot hold '{name}', the text {text!r:.100}, which is not valid"
            " UTF-8; leave it out (--path)",
            leaf=leaf.path,
        ) from None
    return text


def _dtype(name: str, leaf: LeafRecord) -> Dtype:
    """Returns the dtype of a leaf. Raises UnsupportedLeaf where no file holds the leaf."""
    dtype = np.asarray(leaf.value).dtype if leaf.grid is None else dtype_named(leaf.dtype)
    if dtype not in NAMES:
        message = (
            f"a safetensors file cannot hold '{name}' of dtype {dtype}; leave it out (--path) or"
            " cast it before saving"
        )
        raise UnsupportedLeaf(message, leaf=leaf.path, found=str(dtype))
    assert dtype is not None
    if math.prod(leaf.shape) * bits_of(dtype) % 8:
        raise UnsupportedLeaf(
            f"a safetensors file cannot hold '{name}', {dtype}{list(leaf.shape)}: its last byte"
            " would be half full; leave it out (--path) or cast it before saving",
            leaf=leaf.path,
            found=str(dtype),
        )
    return dtype


def _split(
    tensors: Mapping[str, _Tensor], count: int | None, shard_bytes: int, max_file_bytes: int | None
) -> dict[str, dict[str, _Tensor]]:
    """Returns the files to write with their tensors: `count` files, if the store takes these."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    limit = math.inf if max_file_bytes is None else max_file_bytes - HEADER_BYTES
    split = [] if count is None else split_evenly(sizes, count)
    if count is None or any(sum(sizes[name] for name in names) > limit for names in split):
        split = split_shards(sizes, int(min(shard_bytes, limit)))
    if len(split) <= 1:
        return {SINGLE: dict(tensors)}
    return {
        f"model-{number:05d}-of-{len(split):05d}.safetensors": {
            name: tensors[name] for name in names
        }
        for number, names in enumerate(split, 1)
    }


# --- files of tensors


def _tensor_files(
    shards: Mapping[str, Mapping[str, _Tensor]], texts: Mapping[str, str], progress: Progress
) -> Iterator[NewFile]:
    for file, tensors in shards.items():
        # By falling item size, and else in the order that is given.
        ordered = dict(sorted(tensors.items(), key=lambda pair: -bits_of(pair[1].dtype)))
        head = _head_of(ordered, texts)
        size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
        yield file, size, _parts(head, list(ordered.values()), progress)


def _head_of(tensors: Mapping[str, _Tensor], texts: Mapping[str, str]) -> bytes:
    """Returns the head of a file, its length included."""
    header: dict[str, Any] = {"__metadata__": texts}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = tensor.entry(offset)
        offset += tensor.nbytes
    data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-(8 + len(data)) % ALIGN_BYTES)
    return len(data).to_bytes(8, "little") + data


def _parts(head: bytes, tensors: Sequence[_Tensor], progress: Progress) -> Iterator[Part]:
    """Yields a file in its own order, while the leaves are read."""
    yield 0, [memoryview(head)]
    offset = len(head)
    for array in _arrays(tensors):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        bits = bits_of(array.dtype)
        if bits < 8:
            data = pack(data, bits)
        if data.nbytes:
            yield offset, [data.data]
        offset += data.nbytes
        progress(data.nbytes)


def _arrays(tensors: Sequence[_Tensor]) -> Iterator[HostArray]:
    """Yields arrays whole, small ones read together, or large ones in rows."""
    for reader, group in itertools.groupby(tensors, key=lambda tensor: tensor.reader):
        if reader is None:
            yield from (np.asarray(tensor.leaf.value) for tensor in group)
        else:
            leaves = [tensor.leaf for tensor in group]
            wanted = (Wanted(leaf, rows, rows) for leaf in leaves for rows in _regions(leaf))
            yield from read_in_order(reader, wanted)


def _regions(leaf: LeafRecord) -> list[Region]:
    """Returns the rows in which a large array is read, as far as it can be; else the whole."""
    assert leaf.grid is not None
    whole = tuple((0, size) for size in leaf.shape)
    chunk = leaf.grid.chunk_shape
    least = math.prod(chunk) * leaf.numpy_dtype.itemsize
    is_packed = bits_of(leaf.numpy_dtype) < 8  # rows of such may share a byte
    if leaf.nbytes <= CHUNK_BYTES or least > CHUNK_BYTES or is_packed:
        return [whole]
    count = leaf.shape[0]
    rows = max(CHUNK_BYTES * count // leaf.nbytes // chunk[0], 1) * chunk[0]
    return [((first, min(first + rows, count)), *whole[1:]) for first in range(0, count, rows)]


def _index_file(shards: Mapping[str, Mapping[str, _Tensor]]) -> Iterator[NewFile]:
    """Yields the index, if there are several files of tensors."""
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        data = json.dumps(index, indent=2).encode()
        yield INDEX, len(data), [(0, [memoryview(data)])]


# --- files beside them


def _stage_beside(conversion: Conversion, scratch: Path) -> None:
    """Puts the files of all items of files, and of the folder beside, into a scratch folder."""
    checkpoint = conversion.checkpoint
    for name, kind in conversion.others.items():
        if kind == "files":
            selection = PerProcessSelection(conversion.process or 0)
            put_files(scratch, checkpoint.files(name, selection), checkpoint.info.path)
    if conversion.beside is not None:
        there = {*own_names(scratch)}
        files = (
            (name, data) for name, data in files_beside(conversion.beside) if name not in there
        )
        put_files(scratch, files, str(conversion.beside))


def _staged(scratch: Path, where: str) -> tuple[list[str], int | None]:
    """Returns the names of the files to write, without an old index, and of how many shards that
    was.
    """
    names = []
    kept = None
    for own in own_names(scratch):
        if own.endswith(INDEX_SUFFIX):
            kept = shards_of_index((scratch / own).read_bytes())
        elif own.endswith(".safetensors"):
            raise UnsupportedLeaf(
                f"'{own}' among the files of {where} would be taken for tensors; name the items to"
                " take (--item NAME)",
                leaf=own,
            )
        elif not is_folder_name(own):
            names.append(own)
    return names, kept


def _check_beside(
    conversion: Conversion, folder: StorePath, beside: Sequence[str], there: Collection[str]
) -> None:
    """Warns where a model will have no files beside its tensors. Raises StepExists where one of
    them is there already.
    """
    kinds = conversion.checkpoint.info.items.values()
    if "files" not in kinds and not beside and not there:
        _log.warning(
            "%s gets tensors alone: the checkpoint has no config and no tokenizer, which a model of"
            " Hugging Face's needs. To have them there too, name the folder of the model that was"
            " trained: convert(..., beside=FOLDER), or --beside FOLDER",
            folder,
        )
    for name in beside:
        if name in there:
            raise StepExists(
                f"{folder} holds '{name}' already; choose another folder", path=str(folder)
            )


def _local_file(folder: Path, name: str) -> NewFile:
    path = folder / name
    return name, path.stat().st_size, _pieces(path)


def _pieces(path: Path) -> Iterator[Part]:
    """Yields a whole file."""
    offset = 0
    with path.open("rb") as file:
        while data := file.read(BATCH_BYTES):
            yield offset, [memoryview(data)]
            offset += len(data)

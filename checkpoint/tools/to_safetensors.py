"""Writes what a source of any layout holds as a folder of safetensors files, leaf by leaf."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import StepExists, UnsupportedLeaf
from ..format.dtypes import dtype_named
from ..format.record import ItemRecord, LeafRecord
from ..layouts.base import CheckpointReader, read_leaves
from ..layouts.safetensors import INDEX, SINGLE, TAGS, header_of, split_shards
from ..restoring.reader import ArrayReader
from ..storage.base import Part
from ..storage.path import StorePath

HEAD_BYTES = 16 << 20  # left for the header where a store bounds its files
Leaves = Mapping[str, tuple[LeafRecord, ArrayReader]]


def to_safetensors(
    source: CheckpointReader,
    chosen: Mapping[str, tuple[ItemRecord, ArrayReader]],
    folder: StorePath,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> str:
    """Writes the chosen items as one file, or as shards of `shard_bytes` with an index; returns where. Raises StepExists, UnsupportedLeaf.

    One leaf is in memory at a time; on an object store one file.
    """
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in folder.names()):
        raise StepExists(f"{folder} holds safetensors files already; choose another folder", path=str(folder))
    leaves, texts = _named(chosen)
    if source.info.step is not None:
        texts["step"] = str(source.info.step)
    shapes = {name: _shape_and_dtype(name, leaf) for name, (leaf, _) in leaves.items()}
    sizes = {name: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    limit = folder.storage.max_file_bytes
    shards = split_shards(sizes, shard_bytes if limit is None else min(shard_bytes, limit - HEAD_BYTES)) or [[]]
    files = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    try:
        for file, names in zip(files, shards, strict=True):
            head, order = header_of({name: shapes[name] for name in names}, texts)
            size = len(head) + sum(sizes[name] for name in names)
            folder.storage.write((folder / file).name, size, _parts(head, order, leaves, progress))
        if len(shards) > 1:
            _write_index(folder, dict(zip(files, shards, strict=True)), sum(sizes.values()))
    except BaseException:
        folder.storage.delete([(folder / file).name for file in [*files, INDEX]] + ([f"{folder.name}/"] if folder.name else []))
        raise
    return str(folder)


def _named(chosen: Mapping[str, tuple[ItemRecord, ArrayReader]]) -> tuple[dict[str, tuple[LeafRecord, ArrayReader]], dict[str, str]]:
    """Returns the arrays, and the texts for the file's metadata, by the names that they get."""
    leaves: dict[str, tuple[LeafRecord, ArrayReader]] = {}
    texts: dict[str, str] = {"format": "pt"}
    for item_name, (item, reader) in chosen.items():
        for leaf in item.leaves:
            name = f"{item_name}.{plain_name(leaf.path)}" if len(chosen) > 1 else plain_name(leaf.path)
            if name in leaves or name in texts:
                raise UnsupportedLeaf(f"two leaves would be called '{name}' in a safetensors file; rename one of them", leaf=leaf.path)
            if isinstance(leaf.value, (str, bytes)):
                texts[name] = leaf.value if isinstance(leaf.value, str) else leaf.value.hex()
            else:
                leaves[name] = (leaf, reader)
    return leaves, texts


def _write_index(folder: StorePath, shards: Mapping[str, Sequence[str]], size: int) -> None:
    weight_map = {name: file for file, names in shards.items() for name in names}
    data = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode()
    folder.storage.write((folder / INDEX).name, len(data), [(0, [memoryview(data)])])


def plain_name(path: str) -> str:
    """Returns a leaf path without its escapes, as people write it: `\\.` is a dot."""
    return path if "\\" not in path else "".join(_unescaped(path))


def _unescaped(path: str) -> Iterator[str]:
    characters = iter(path)
    for character in characters:
        if character != "\\":
            yield character
            continue
        following = next(characters, "")
        yield {"r": "value", "e": ""}.get(following, following)


def _shape_and_dtype(name: str, leaf: LeafRecord) -> tuple[tuple[int, ...], np.dtype[Any]]:
    dtype = np.asarray(leaf.value).dtype if leaf.grid is None else dtype_named(leaf.dtype)
    if dtype not in TAGS:
        message = f"a safetensors file cannot hold '{name}' of dtype {dtype}; leave it out (--path) or cast it before saving"
        raise UnsupportedLeaf(message, leaf=leaf.path, found=str(dtype))
    assert dtype is not None
    return leaf.shape, dtype


def _parts(head: bytes, order: Sequence[str], leaves: Leaves, progress: Callable[[int], None]) -> Iterable[Part]:
    """Yields the file in pieces, in its own order, while the leaves are read."""
    yield 0, [memoryview(head)]
    offset = len(head)
    for name in order:
        leaf, reader = leaves[name]
        array = np.asarray(leaf.value) if leaf.grid is None else next(read_leaves(reader, [leaf]))[1]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.nbytes:
            yield offset, [data.data]
        offset += data.nbytes
        progress(data.nbytes)

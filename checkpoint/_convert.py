"""Turns a checkpoint of one layout into one of another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ._dtypes import dtype_named
from ._errors import StepExists, StepNotFound, UnsupportedLeaf
from ._items import Json
from ._place import Place
from ._reader import Target
from ._record import ItemRecord, LeafRecord
from ._rename import Names
from ._restore import Filler, allocate
from ._safetensors import INDEX, SHARD_BYTES, SINGLE, TAGS, header_of, split_shards
from ._source import RenamedReader, Source, renamed
from ._storage import Part
from ._tree import rebuild

BATCH_BYTES = 256 << 20
Progress = Callable[[int], None]


def convert(
    source: Source,
    target: Place,
    to: str,
    *,
    items: Sequence[str] = (),
    under: str = "",
    rename: Names = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done_bytes: None,
) -> str:
    """Writes what `source` holds as a new checkpoint in the layout `to` ("holdfast", "orbax" or "safetensors"); returns where it is.

    For holdfast and Orbax `target` is a root and the checkpoint becomes a step of it, for safetensors it is the folder itself. `items`
    chooses among several (none: all), `under` keeps the leaves below one path, `rename` gives leaves other paths (their tree becomes a
    flat dict). Raises StepExists, UnsupportedLeaf for what the layout cannot hold, Corrupt, SaveFailed.
    """
    chosen = _chosen(source, items)
    if under or rename is not None:
        chosen = {name: _selected(found, under, rename) for name, found in chosen.items()}
    if to == "safetensors":
        return _to_safetensors(source, chosen, target, shard_bytes, progress)
    if to == "orbax":
        return _to_orbax(source, chosen, target, progress)
    if to == "holdfast":
        return _to_holdfast(source, chosen, target, progress)
    raise ValueError(f'there is no layout {to!r}: choose "holdfast", "orbax" or "safetensors"')


Selected = tuple[ItemRecord, Filler]


def _chosen(source: Source, items: Sequence[str]) -> dict[str, Selected]:
    wanted = items or [name for name, kind in source.info.items.items() if kind == "tree"]
    unknown = [name for name in wanted if name not in source.info.items]
    if unknown:
        known = ", ".join(source.info.items) or "none"
        raise StepNotFound(f"{source.info.path} has no item '{unknown[0]}'; it has: {known}", path=source.info.path)
    return {name: (source.item(name), source.reader(name)) for name in wanted if source.info.items[name] == "tree"}


def _selected(selected: Selected, under: str, rename: Names) -> Selected:
    item, reader = selected
    kept = [leaf for leaf in item.leaves if not under or leaf.path == under or leaf.path.startswith(f"{under}.")]
    if not kept:
        raise StepNotFound(f"the item '{item.name}' has no leaf below '{under}'")
    part = replace(item, leaves=tuple(kept))
    new = renamed(part, rename)
    return new, RenamedReader(reader, new, part)


def _filled(reader: Filler, leaves: Sequence[LeafRecord], progress: Progress) -> Iterator[tuple[LeafRecord, np.ndarray[Any, Any]]]:
    """Yields the arrays of leaves, read in batches of bounded size."""
    batch: list[Target] = []
    for leaf in leaves:
        batch.append(Target(leaf, tuple((0, size) for size in leaf.shape)))
        if sum(target.nbytes for target in batch) >= BATCH_BYTES or leaf is leaves[-1]:
            reader.fill(batch, allocate)
            for target in batch:
                assert target.array is not None
                yield target.leaf, target.array
                progress(target.nbytes)
            batch = []


def _arrays(item: ItemRecord) -> list[LeafRecord]:
    return [leaf for leaf in item.leaves if leaf.grid is not None]


def _json_items(source: Source) -> dict[str, Any]:
    return {name: source.json(name) for name, kind in source.info.items.items() if kind == "json"}


def _to_orbax(source: Source, chosen: Mapping[str, Selected], root: Place, progress: Progress) -> str:
    from ._orbax_write import OrbaxWriter

    target = root / str(source.info.step or 0)
    writer = OrbaxWriter(target)
    try:
        for name, (item, reader) in chosen.items():
            names = dict(zip(map(id, item.leaves), writer.add_record(item), strict=True))
            held: list[np.ndarray[Any, Any]] = []
            for leaf, array in _filled(reader, _arrays(item), progress):
                writer.write(name, names[id(leaf)], (), array)
                held.append(array)
                if sum(kept.nbytes for kept in held) >= BATCH_BYTES:
                    writer.flush()
                    held = []
            writer.flush()
        for name, value in _json_items(source).items():
            writer.add_json(name, value)
        writer.finish(metrics=source.info.metrics, metadata=source.info.metadata)
    except BaseException:
        writer.abandon()
        raise
    return str(target)


def _to_holdfast(source: Source, chosen: Mapping[str, Selected], root: Place, progress: Progress) -> str:
    from ._manager import CheckpointManager

    step, info = source.info.step or 0, source.info
    with CheckpointManager(str(root)) as manager:
        if step in manager.all_steps():
            raise StepExists(f"step {step} is already in {root}; choose another place or delete it first", path=str(root), step=step)
        items: dict[str, Any] = {name: Json(value) for name, value in _json_items(source).items()}
        for name, (item, reader) in chosen.items():
            arrays = {id(leaf): _live(leaf, array) for leaf, array in _filled(reader, _arrays(item), progress)}
            items[name] = rebuild(item.tree, [arrays.get(id(leaf), leaf.value) for leaf in item.leaves])
        metrics = {name: value for name, value in info.metrics.items() if isinstance(value, (int, float))}
        manager.save(step, items=items, metrics=metrics, metadata=info.metadata, force=True)
        manager.wait_until_finished()
    return str(root / str(step))


def _live(leaf: LeafRecord, array: np.ndarray[Any, Any]) -> Any:
    """Returns a leaf as what it was: jax's where jax can hold it without changing it, else numpy's."""
    if leaf.kind == "key":
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf.impl)
    if leaf.kind == "array" and jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
        return jax.numpy.asarray(array)
    return array[()] if leaf.kind == "scalar" else array


def _to_safetensors(source: Source, chosen: Mapping[str, Selected], folder: Place, shard_bytes: int, progress: Progress) -> str:
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in folder.names()):
        raise StepExists(f"{folder} holds safetensors files already; choose another folder", path=str(folder))
    several = len(chosen) > 1
    leaves: dict[str, tuple[LeafRecord, Filler]] = {}
    texts: dict[str, str] = {"format": "pt"}
    for item_name, (item, reader) in chosen.items():
        for leaf in item.leaves:
            name = f"{item_name}.{plain_name(leaf.path)}" if several else plain_name(leaf.path)
            if name in leaves or name in texts:
                raise UnsupportedLeaf(f"two leaves would be called '{name}' in a safetensors file; rename one of them", leaf=leaf.path)
            if isinstance(leaf.value, (str, bytes)):
                texts[name] = leaf.value if isinstance(leaf.value, str) else leaf.value.hex()
            else:
                leaves[name] = (leaf, reader)
    if source.info.step is not None:
        texts["step"] = str(source.info.step)
    shapes = {name: _shape_and_dtype(name, leaf) for name, (leaf, _) in leaves.items()}
    sizes = {name: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    shards = split_shards(sizes, shard_bytes)
    files = [SINGLE] if len(shards) <= 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards or [[]], strict=True):
        head, order = header_of({name: shapes[name] for name in names}, texts)
        size = len(head) + sum(sizes[name] for name in names)
        folder.storage.write((folder / file).name, size, _parts(head, order, leaves, progress))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: f for f, ns in zip(files, shards, strict=True) for n in ns},
        }
        data = json.dumps(index, indent=2).encode()
        folder.storage.write((folder / INDEX).name, len(data), [(0, [memoryview(data)])])
    return str(folder)


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


def _parts(head: bytes, order: Sequence[str], leaves: Mapping[str, tuple[LeafRecord, Filler]], progress: Progress) -> Iterable[Part]:
    """Yields the file in pieces, in its own order, while the leaves are read."""
    yield 0, [memoryview(head)]
    offset = len(head)
    for name in order:
        leaf, reader = leaves[name]
        arrays = [array for _, array in _filled(reader, [leaf], progress)] if leaf.grid is not None else [np.asarray(leaf.value)]
        data = np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
        if data.nbytes:
            yield offset, [data.data]
        offset += data.nbytes


__all__ = ["convert", "plain_name"]

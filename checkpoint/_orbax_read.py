"""Reads checkpoints that Orbax wrote, v0 and v1, through tensorstore: any part of any leaf, many at a time.

Only the metadata files are parsed here (`_orbax_metadata.py`); the arrays, in zarr v2 or v3, in an OCDBT database or in plain files, are
tensorstore's. A missing chunk is an error, never silently the fill value, unless the checkpoint says that such chunks were left out.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from . import _orbax_metadata as files
from ._errors import Corrupt, HostileCheckpoint, StepNotFound
from ._layouts import Info, Leaf, Part, Place
from ._storage import Entry

MAX_RANK = 32  # tensorstore's own bound
MAX_BYTES = 1 << 50  # of one leaf; what says more is no checkpoint
_CONTEXT = {"file_io_concurrency": {"limit": 32}, "cache_pool": {"total_bytes_limit": 100_000_000}}
_NESTED = ("jax_random_key", "np_random_key")  # the folder inside an item of a random key


class OrbaxLayout:
    """Is Orbax's layout: a folder of items, or (v0, "direct") the files of one item."""

    name = "orbax"

    def recognises(self, place: Place, names: Mapping[str, Entry]) -> bool:
        if files.TEMPORARY in place.basename:
            return False
        if files.CHECKPOINT_METADATA in names or files.MARKER in names or files.TREE_METADATA in names or files.MANIFEST in names:
            return not place.storage.root.startswith("gs://") or files.COMMITTED in names
        folders = [name for name in names if name.endswith("/") and files.step_of(name[:-1]) is None]
        return any(not {files.TREE_METADATA, files.MANIFEST}.isdisjoint((place / name[:-1]).names()) for name in folders)

    def open(self, place: Place) -> OrbaxSource:
        return OrbaxSource(place)

    def step_of(self, name: str) -> int | None:
        return files.step_of(name)


class OrbaxSource:
    """Is one checkpoint of Orbax's. `read` and `tree` may be called from several threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._context = ts.Context(_CONTEXT)
        self._trees: dict[str, _Item] = {}
        self._lock = threading.Lock()
        names = place.names()
        self._folders = self._find_items(names)
        self.info = self._read_info(names)

    def _find_items(self, names: Mapping[str, Entry]) -> dict[str, tuple[Place, str]]:
        """Returns each item's folder and kind. A direct checkpoint is one item, "default"."""
        if files.TREE_METADATA in names or files.MANIFEST in names:
            return {"default": (self._place, "tree")}
        gone = self._deleted(names)
        found = {}
        for name in sorted(name[:-1] for name in names if name.endswith("/")):
            if files.TEMPORARY not in name and name not in gone and name != "descriptor":
                found[name] = _kind_of(self._place / name)
        return found

    def _deleted(self, names: Mapping[str, Entry]) -> set[str]:
        if files.DELETION not in names:
            return set()
        value = files.parse_json(self._place.fetch(files.DELETION), f"{self._place}/{files.DELETION}")
        text = json.dumps(value)
        return {name[:-1] for name in names if name.endswith("/") and f'"{name[:-1]}"' in text}

    def _read_info(self, names: Mapping[str, Entry]) -> Info:
        about: Any = {}
        if files.CHECKPOINT_METADATA in names:
            about = files.parse_json(self._place.fetch(files.CHECKPOINT_METADATA), f"{self._place}/{files.CHECKPOINT_METADATA}")
        about = about if isinstance(about, dict) else {}
        metrics = about.get("metrics") or {}
        if not metrics and self._folders.get("metrics", (None, ""))[1] == "json":
            metrics = self.json("metrics")
        times = [about.get(name) for name in ("init_timestamp_nsecs", "commit_timestamp_nsecs")]
        started, finished = [time / 1e9 if isinstance(time, int) and time else None for time in times]
        items = {name: kind for name, (_, kind) in self._folders.items() if name != "metrics"}
        metrics = metrics if isinstance(metrics, dict) else {}
        return Info("orbax", str(self._place), items, self._step(), started, finished, metrics, about.get("custom_metadata") or None)

    def _step(self) -> int | None:
        return files.step_of(self._place.basename)

    def json(self, item: str) -> Any:
        place, _ = self._folder(item)
        names = place.names()
        for name in files.JSON_FILES:
            if name in names:
                return files.parse_json(place.fetch(name), f"{place}/{name}")
        raise Corrupt(f"{place} has none of {', '.join(files.JSON_FILES)}; the item '{item}' has lost its data", file=str(place))

    def _folder(self, item: str) -> tuple[Place, str]:
        if item not in self._folders:
            known = ", ".join(sorted(self._folders)) or "none"
            raise StepNotFound(f"{self._place} has no item '{item}'; it has: {known}", path=str(self._place))
        return self._folders[item]

    def tree(self, item: str) -> Any:
        place, kind = self._folder(item)
        if kind == "json":
            return self.json(item)
        with self._lock:
            if item not in self._trees:
                self._trees[item] = _Item(place, self._context)
            return self._trees[item].tree

    def read(self, item: str, parts: Sequence[Part], buffers: Sequence[np.ndarray]) -> None:
        self.tree(item)
        self._trees[item].read(parts, buffers)


def _kind_of(place: Place) -> tuple[Place, str]:
    """Returns the folder that holds an item's files, and the item's kind."""
    names = place.names()
    for nested in _NESTED:
        if nested + "/" in names:
            return place / nested, "tree"
    if files.TREE_METADATA in names or files.MANIFEST in names or files.ARRAY_METADATAS + "/" in names:
        return place, "tree"
    if any(name in names for name in files.JSON_FILES):
        return place, "json"
    return place, "unknown"


class _Item:
    """One tree item: its metadata, read at once, and the arrays, opened when a part of them is read."""

    def __init__(self, place: Place, context: Any) -> None:
        self._place, self._context = place, context
        self._names = place.names()
        about = self._metadata()
        self._fills = about.fills
        self._driver, self._meta_name = ("zarr3", "zarr.json") if about.use_zarr3 else ("zarr", ".zarray")
        self._base = self._find_base(about)
        self._specs: dict[str, Any] = {}
        self._stores: dict[str, Any] = {}
        self.tree = self._build(about)

    def _metadata(self) -> files.TreeMetadata:
        file = f"{self._place}/{files.TREE_METADATA}"
        if files.TREE_METADATA not in self._names:
            raise Corrupt(f"{file} is missing: without it nobody can tell what the arrays beside it are", file=file)
        return files.parse_tree_metadata(self._place.fetch(files.TREE_METADATA), file)

    def _find_base(self, about: files.TreeMetadata) -> dict[str, Any]:
        base = kvstore_of(self._place)
        ocdbt = about.use_ocdbt if about.use_ocdbt is not None else files.MANIFEST in self._names
        if not ocdbt:
            for leaf in about.leaves:  # names of files: they must stay inside
                if ".." in ".".join(leaf.path).split("/") or "\0" in "".join(leaf.path):
                    raise HostileCheckpoint(f"{self._place}/{files.TREE_METADATA} names a leaf {leaf.path!r}, outside of its folder")
            return base
        if files.MANIFEST not in self._names and any(_has_data(leaf) for leaf in about.leaves):
            file = f"{self._place}/{files.MANIFEST}"
            raise Corrupt(f"{file} is missing: it leads to the data of every array of this item", file=file)
        return {"driver": "ocdbt", "base": base}

    def _build(self, about: files.TreeMetadata) -> Any:
        strings = self._optional_json(files.STRINGS)
        prng = self._prng_implementations()
        shardings = files.parse_shardings(self._place.fetch(files.SHARDING), files.SHARDING) if files.SHARDING in self._names else {}
        wanted = {".".join(leaf.path): leaf for leaf in about.leaves if _has_data(leaf)}
        self._specs = self._array_specs(wanted)
        values: dict[tuple[tuple[str, bool], ...], Any] = {}
        for leaf in about.leaves:
            name = ".".join(leaf.path)
            if leaf.empty:
                values[leaf.keys] = files.empty_value(leaf.value_type)
            elif leaf.value_type == "string":
                values[leaf.keys] = self._string(leaf, name, strings)
            else:
                values[leaf.keys] = self._leaf(leaf, name, prng, shardings)
        if self._place.basename == "np_random_key":
            return tuple(files.build_tree(values))
        if [leaf.path for leaf in about.leaves] == [("checkpoint",)]:
            return self._single(next(iter(values.values())))
        return files.build_tree(values)

    def _single(self, leaf: Any) -> Any:
        """An item that is one array or one key, not a tree of them."""
        if self._place.basename != "jax_random_key":
            return Leaf((), leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.prng, chunks=leaf.chunks, sharding=leaf.sharding)
        place = Place(self._place.storage, self._place.name.removesuffix("jax_random_key") + "jax_random_key_metadata")
        about = files.parse_json(place.fetch("metadata"), f"{place}/metadata") if "metadata" in place.names() else {}
        prng = None
        if about.get("typed"):
            prng = files.prng_name(about.get("impl") or leaf.prng or _default_prng(leaf.shape))
        return Leaf((), leaf.name, leaf.kind, leaf.shape, leaf.dtype, prng, chunks=leaf.chunks)

    def _string(self, leaf: files.StoredLeaf, name: str, strings: Mapping[str, Any]) -> Leaf:
        if not isinstance(strings.get(name), str):
            file = f"{self._place}/{files.STRINGS}"
            raise Corrupt(f"{file} has no text for '{name}', which {files.TREE_METADATA} names", file=file, leaf=name)
        return Leaf(leaf.path, name, "string", value=strings[name])

    def _leaf(self, leaf: files.StoredLeaf, name: str, prng: Mapping[str, str], shardings: Mapping[str, Any]) -> Leaf:
        shape, dtype, chunks = _describe(self._specs[name], f"{self._place}/{name}/{self._meta_name}", name)
        kind = {"scalar": "scalar", "np.ndarray": "numpy"}.get(leaf.value_type, "array")
        return Leaf(leaf.path, name, kind, shape, dtype, prng.get(name), chunks=chunks, sharding=shardings.get(name))

    def _optional_json(self, name: str) -> dict[str, Any]:
        value = files.parse_json(self._place.fetch(name), f"{self._place}/{name}") if name in self._names else {}
        return value if isinstance(value, dict) else {}

    def _prng_implementations(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if files.ARRAY_METADATAS + "/" in self._names:
            place = self._place / files.ARRAY_METADATAS
            for name in place.names():
                found |= files.parse_array_metadata(place.fetch(name), f"{place}/{name}")
        return found

    def _array_specs(self, wanted: Mapping[str, files.StoredLeaf]) -> dict[str, Any]:
        """Reads the zarr metadata of all arrays side by side."""
        if not wanted:
            return {}
        with self._errors(""):
            store = ts.KvStore.open(self._base, context=self._context).result()
        pending = {name: store.read(f"{name}/{self._meta_name}") for name in wanted}
        found = {}
        known: dict[bytes, Any] = {}  # most arrays of a tree look like another one
        for name, future in pending.items():
            with self._errors(name):
                value = future.result()
            file = f"{self._place}/{name}/{self._meta_name}"
            if value.state != "value":
                message = f"{file} is missing: {files.TREE_METADATA} names the leaf '{name}', but its array is not there"
                raise Corrupt(message, file=file, leaf=name)
            if value.value not in known:
                known[value.value] = files.parse_json(value.value, file)
            found[name] = known[value.value]
        return found

    def read(self, parts: Sequence[Part], buffers: Sequence[np.ndarray]) -> None:
        opening = {part.leaf.name: self._open(part.leaf.name) for part in parts if part.leaf.name not in self._stores}
        for name, future in opening.items():
            with self._errors(name):
                self._stores[name] = future.result()
        pending = []
        for part, buffer in zip(parts, buffers, strict=True):
            store = self._stores[part.leaf.name][part.index]
            pending.append(ts.array(buffer, context=self._context).write(store, can_reference_source_data_indefinitely=True))
        for part, future in zip(parts, pending, strict=True):
            with self._errors(part.leaf.name):
                future.result()

    def _open(self, name: str) -> Any:
        base = (
            dict(self._base, path=f"{name}/") if self._base["driver"] == "ocdbt" else dict(self._base, path=f"{self._base['path']}{name}/")
        )
        spec = {
            "driver": self._driver,
            "kvstore": base,
            "metadata": self._specs[name],
            "assume_metadata": True,
            "fill_missing_data_reads": self._fills,
            "recheck_cached_data": False,
        }
        return ts.open(spec, context=self._context, open=True, read=True)

    def _errors(self, leaf: str) -> _Translate:
        return _Translate(str(self._place), leaf)


class _Translate:
    """Turns tensorstore's errors into ours."""

    def __init__(self, place: str, leaf: str) -> None:
        self._place, self._leaf = place, leaf

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (ValueError, OSError, NotImplementedError)):
            return
        what = f"the leaf '{self._leaf}'" if self._leaf else "the arrays"
        reason = str(error).split(" [source locations=")[0]
        raise Corrupt(f"{what} of {self._place} cannot be read: {reason}", file=self._place, leaf=self._leaf) from error


def kvstore_of(place: Place) -> dict[str, Any]:
    """Returns tensorstore's JSON spec of a folder."""
    spec = getattr(place.storage, "kvstore_spec", None)
    if spec is not None:
        found: dict[str, Any] = dict(spec)
        return dict(found, path=f"{found.get('path', '')}{place.name}/".lstrip("/"))
    return {"driver": "file", "path": f"{place}/"}


def _has_data(leaf: files.StoredLeaf) -> bool:
    return not leaf.empty and leaf.value_type != "string"


def _default_prng(shape: tuple[int, ...]) -> str:
    return "rbg" if shape and shape[-1] == 4 else "threefry2x32"


def _describe(spec: Any, file: str, leaf: str) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...]]:
    """Returns shape, dtype and chunk shape from a leaf's zarr metadata (v2 or v3)."""
    try:
        shape = tuple(int(size) for size in spec["shape"])
        if "chunks" in spec:
            dtype, chunks = str(spec["dtype"]), tuple(int(size) for size in spec["chunks"])
        else:
            dtype = str(spec["data_type"])
            chunks = tuple(int(size) for size in spec["chunk_grid"]["configuration"]["chunk_shape"])
        numpy_dtype = _numpy_dtype(dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{file} does not describe an array: {error!r}", file=file, leaf=leaf) from None
    if len(shape) > MAX_RANK or min(shape, default=0) < 0 or math.prod(shape) * numpy_dtype.itemsize > MAX_BYTES:
        raise HostileCheckpoint(f"{file} describes an array of shape {shape}, which no writer makes", file=file)
    return shape, numpy_dtype, chunks


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype that zarr v2 ("<f4", "bfloat16") or v3 ("float32") calls by this name."""
    if name[:1] in "<>|":
        return np.dtype(name).newbyteorder("=")
    found: np.dtype[Any] = ts.dtype(name).numpy_dtype
    return found


__all__ = ["OrbaxLayout", "OrbaxSource", "kvstore_of"]

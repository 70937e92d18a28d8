"""Writes checkpoints in Orbax's layout: what its v0 manager and its v1 free functions both restore.

The checkpoint is made under a temporary name that no version of Orbax takes for a step, and gets its own name when all is there. One
process writes an OCDBT database; several write plain zarr files, each the chunks that it owns, since a database has one writer.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from holdfast.multihost import Group, Solo

from . import _orbax_metadata as files
from ._errors import CheckpointError, SaveFailed, StepExists, UnsupportedLeaf
from ._layouts import Index, Leaf, Place
from ._orbax_read import kvstore_of

TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
JSON_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
CHUNK_BYTES = 64 << 20
_KINDS = {"array": "jax.Array", "numpy": "np.ndarray", "scalar": "scalar", "string": "string"}
_EMPTY = {dict: "Dict", list: "List", tuple: "Tuple", type(None): "None"}
Keys = tuple[tuple[str, bool], ...]


class OrbaxWriter:
    """Writes one checkpoint: `add_tree` and `add_json` for each item, `write` for each part that this process owns, then `finish`.

    In a group every process makes the same calls. `abandon` removes what was written so far. For one thread at a time.
    """

    def __init__(self, place: Place, *, group: Group | None = None) -> None:
        self._final, self._group = place, group or Solo()
        self._local = not any(place.storage.root.startswith(scheme) for scheme in ("gs://", "s3://", "memory://"))
        parent, _, base = place.name.rpartition("/")
        self._place = place
        if self._local:
            self._place = Place(place.storage, f"{parent}/{base}{files.TEMPORARY}" if parent else f"{base}{files.TEMPORARY}")
        if self._group.index == 0 and place.names():
            raise StepExists(f"{place} is there already; choose another place or delete it first", path=str(place))
        self._started_ns = time.time_ns()
        self._context = ts.Context({"file_io_concurrency": {"limit": 16}})
        self._files = ts.KvStore.open(kvstore_of(self._place), context=self._context).result()
        self._handlers: dict[str, str] = {}
        self._stores: dict[tuple[str, str], Any] = {}
        self._pending: list[tuple[str, Any]] = []
        self._ocdbt = self._group.count == 1

    def add_json(self, item: str, value: Any, *, handler: str | None = JSON_HANDLER) -> None:
        """Adds a JSON item, under the names of both versions."""
        if handler:
            self._handlers[item] = handler
        data = json.dumps(value).encode()
        for name in ("metadata", "data.json") if handler else ("metrics",):
            self._put(f"{item}/{name}", data)
        self._put(f"{item}/{files.COMMITTED}", b"")

    def add_tree(self, item: str, tree: Any) -> dict[str, Leaf]:
        """Adds an item and makes its arrays, still empty; returns its leaves by name. `tree` is of `Leaf`s or of live values."""
        self._handlers[item] = TREE_HANDLER
        leaves = _leaves(tree)
        named: dict[str, Leaf] = {}
        for leaf in leaves.values():
            if isinstance(leaf, Leaf) and named.setdefault(leaf.name, leaf) is not leaf:
                raise UnsupportedLeaf(f"two leaves are called '{leaf.name}' in Orbax's layout; rename one of them", leaf=leaf.name)
        if self._group.index == 0:
            self._put_metadata(item, leaves, named)
        self._open(item, [leaf for leaf in named.values() if leaf.kind != "string"])
        return named

    def _put_metadata(self, item: str, leaves: Mapping[Keys, Leaf | str], named: Mapping[str, Leaf]) -> None:
        tree = {}
        for keys, leaf in leaves.items():
            about: dict[str, Any] = {"value_type": leaf, "skip_deserialize": True}
            if isinstance(leaf, Leaf):
                about = {"value_type": _KINDS[leaf.kind], "skip_deserialize": False}
                if leaf.kind == "array":
                    about["write_shape"] = list(leaf.chunks or ())
            tree[repr(tuple(key for key, _ in keys))] = {
                "key_metadata": [{"key": key, "key_type": 1 if index else 2} for key, index in keys],
                "value_metadata": about,
            }
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": self._ocdbt,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        self._put(f"{item}/{files.TREE_METADATA}", json.dumps(metadata).encode())
        arrays = [leaf for leaf in named.values() if leaf.kind == "array"]
        if arrays:
            self._put(f"{item}/{files.ARRAY_METADATAS}/process_0", json.dumps(_array_metadatas(arrays)).encode())
            self._put(f"{item}/{files.SHARDING}", json.dumps(_shardings(arrays)).encode())
        strings = {leaf.name: leaf.value for leaf in named.values() if leaf.kind == "string"}
        if strings:
            self._put(f"{item}/{files.STRINGS}", json.dumps(strings).encode())

    def _open(self, item: str, leaves: Sequence[Leaf]) -> None:
        """Makes the arrays at the primary, then opens them everywhere."""
        base = kvstore_of(self._place / item)
        if self._ocdbt:
            base = {"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": 1024, "compression": {"id": "zstd"}}}

        def opened(create: bool) -> None:
            pending = {leaf.name: ts.open(_spec(base, leaf), context=self._context, create=create, open=not create) for leaf in leaves}
            for name, future in pending.items():
                try:
                    self._stores[item, name] = future.result()
                except (ValueError, NotImplementedError) as error:
                    raise UnsupportedLeaf(f"Orbax's layout cannot hold '{name}': {error}", leaf=name) from error

        if self._group.index == 0:
            opened(True)
        if self._group.count > 1:
            self._group.barrier(f"orbax/{item}/made", timeout_s=600)
            if self._group.index:
                opened(False)

    def write(self, item: str, name: str, index: Index, array: np.ndarray) -> None:
        """Starts writing one part of a leaf; the array must stay as it is until `flush`."""
        self._pending.append((name, self._stores[item, name][index].write(array, can_reference_source_data_indefinitely=True)))

    def flush(self) -> None:
        """Waits for what `write` has started; raises SaveFailed naming the leaf."""
        pending, self._pending = self._pending, []
        for name, future in pending:
            try:
                future.result()
            except (ValueError, OSError) as error:
                raise SaveFailed(f"'{name}' could not be written to {self._final}: {error}", path=str(self._final)) from error

    def finish(self, *, metrics: Mapping[str, Any] | None = None, metadata: Any = None, timeout_s: float = 600) -> None:
        """Waits for all writers, then makes the checkpoint appear, whole."""
        self.flush()
        if self._group.count > 1:
            self._group.barrier("orbax/written", timeout_s=timeout_s)
        if self._group.index == 0:
            self._commit(metrics, metadata)
        if self._group.count > 1:
            self._group.barrier("orbax/committed", timeout_s=timeout_s)

    def _commit(self, metrics: Mapping[str, Any] | None, metadata: Any) -> None:
        for item, handler in self._handlers.items():
            if handler == TREE_HANDLER:
                self._put(f"{item}/{files.COMMITTED}", b"")
        if metrics:
            self.add_json("metrics", dict(metrics), handler=None)
        about = {
            "item_handlers": self._handlers,
            "metrics": dict(metrics or {}),
            "performance_metrics": {},
            "init_timestamp_nsecs": self._started_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": metadata if isinstance(metadata, dict) else {},
        }
        self._put(files.CHECKPOINT_METADATA, json.dumps(about).encode())
        self._put(files.MARKER, b"")
        self._put(files.COMMITTED, b"")
        if self._local:
            os.rename(str(self._place), str(self._final))
            _sync_folder(os.path.dirname(str(self._final)))

    def abandon(self) -> None:
        """Removes what an unfinished save has written."""
        self._pending = []
        self._stores = {}
        if self._group.index == 0:
            self._files.delete_range(ts.KvStore.KeyRange()).result()

    def _put(self, name: str, data: bytes) -> None:
        if self._group.index == 0:
            self._files.write(name, data).result()


def save_orbax(
    place: Place,
    items: Mapping[str, Any],
    *,
    json_items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    group: Group | None = None,
) -> None:
    """Saves live trees in Orbax's layout; each process writes the first copy of the shards that it holds. Blocks until all is durable.

    Raises StepExists, UnsupportedLeaf for what Orbax cannot hold (arrays of size zero, bytes), SaveFailed.
    """
    writer = OrbaxWriter(place, group=group)
    try:
        for item, tree in items.items():
            named = writer.add_tree(item, tree)
            for name, leaf in named.items():
                for index, array in _owned(leaf, primary=group is None or group.index == 0):
                    writer.write(item, name, index, array)
        for item, value in (json_items or {}).items():
            writer.add_json(item, value)
        writer.finish(metrics=metrics, metadata=metadata)
    except CheckpointError:
        writer.abandon()
        raise


def _owned(leaf: Leaf, *, primary: bool) -> list[tuple[Index, np.ndarray]]:
    """Returns the parts of a live leaf that this process writes."""
    if leaf.kind == "string":
        return []
    value = leaf.value
    if leaf.kind != "array" or value.is_fully_addressable:
        whole = tuple(slice(0, size) for size in leaf.shape)
        return [(whole, np.asarray(value))] if primary else []
    shards = [shard for shard in value.addressable_shards if shard.replica_id == 0]
    return [(shard.index, np.asarray(shard.data)) for shard in shards]


def _leaves(tree: Any) -> dict[Keys, Leaf | str]:
    """Returns each leaf, or Orbax's word for an empty container, by its keys."""

    def is_leaf(value: Any) -> bool:
        return value is None or isinstance(value, Leaf) or (isinstance(value, (dict, list, tuple)) and not value)

    found: dict[Keys, Leaf | str] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        keys = tuple(_key(key) for key in path)
        name = ".".join(key for key, _ in keys) or "checkpoint"
        if not keys:
            keys = (("checkpoint", False),)
        if is_leaf(value) and not isinstance(value, Leaf):
            found[keys] = "NamedTuple" if hasattr(value, "_fields") else _EMPTY.get(type(value), "Dict")
        else:
            found[keys] = _storable(tuple(key for key, _ in keys), name, value)
    return found


def _key(key: Any) -> tuple[str, bool]:
    if isinstance(key, (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)):
        return str(getattr(key, "idx", getattr(key, "key", ""))), True
    return str(getattr(key, "name", getattr(key, "key", key))), False


def _storable(path: tuple[str, ...], name: str, value: Any) -> Leaf:
    """Describes a leaf as it will lie in Orbax's layout; raises UnsupportedLeaf."""
    if isinstance(value, Leaf):
        leaf = Leaf(path, name, value.kind, value.shape, value.dtype, value.prng, value.value, None, value.sharding)
    elif isinstance(value, str):
        return Leaf(path, name, "string", value=value)
    elif isinstance(value, (bool, int, float)):
        array = np.asarray(value)
        leaf = Leaf(path, name, "scalar", (), array.dtype, value=array)
    elif isinstance(value, (np.ndarray, np.generic)):
        leaf = Leaf(path, name, "numpy", value.shape, value.dtype, value=value)
    elif isinstance(value, jax.Array):
        leaf = _array_leaf(path, name, value)
    else:
        message = f"Orbax's layout cannot hold '{name}', a {type(value).__name__}; leave it out or make it an array or text"
        raise UnsupportedLeaf(message, leaf=name, found=type(value).__name__)
    if leaf.kind == "string":
        return leaf
    if 0 in leaf.shape:
        message = f"Orbax's layout cannot hold '{name}', an array of shape {leaf.shape}: it has no arrays of size zero"
        raise UnsupportedLeaf(message, leaf=name, found=str(leaf.shape))
    chunks = leaf.chunks or _chunk_shape(leaf.shape, leaf.dtype.itemsize)
    return Leaf(path, name, leaf.kind, leaf.shape, leaf.dtype, leaf.prng, leaf.value, chunks, leaf.sharding)


def _array_leaf(path: tuple[str, ...], name: str, value: jax.Array) -> Leaf:
    prng = None
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        prng = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    chunks = None if value.is_fully_addressable else value.sharding.shard_shape(value.shape)
    return Leaf(path, name, "array", value.shape, np.dtype(value.dtype), prng, value, chunks, _sharding_json(value.sharding))


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns chunks of at most CHUNK_BYTES, cut along leading axes."""
    chunk = list(shape)
    for axis in range(len(chunk)):
        rest = itemsize
        for size in chunk[axis + 1 :]:
            rest *= size
        chunk[axis] = max(1, min(chunk[axis], CHUNK_BYTES // rest))
        if chunk[axis] * rest <= CHUNK_BYTES and chunk[axis] > 1:
            break
    return tuple(chunk)


def _spec(base: Mapping[str, Any], leaf: Leaf) -> dict[str, Any]:
    inside = "" if base["driver"] == "ocdbt" else base["path"]
    return {
        "driver": "zarr",
        "kvstore": dict(base, path=f"{inside}{leaf.name}/"),
        "metadata": {
            "shape": list(leaf.shape),
            "chunks": list(leaf.chunks or ()),
            "dtype": ts.dtype(leaf.dtype).name if leaf.dtype.kind == "V" else leaf.dtype.newbyteorder("<").str,
            "compressor": {"id": "zstd", "level": 1},
            "fill_value": None,
            "order": "C",
        },
        "store_data_equal_to_fill_value": True,
    }


def _array_metadatas(leaves: Sequence[Leaf]) -> dict[str, Any]:
    return {
        "array_metadatas": [
            {
                "array_metadata": {
                    "param_name": leaf.name,
                    "write_shape": list(leaf.chunks or ()),
                    "chunk_shape": list(leaf.chunks or ()),
                    "ext_metadata": {"random_key_impl": leaf.prng} if leaf.prng else None,
                }
            }
            for leaf in leaves
        ]
    }


def _shardings(leaves: Sequence[Leaf]) -> dict[str, str]:
    usual = {"sharding_type": "SingleDeviceSharding", "device_str": str(jax.local_devices()[0])}
    return {base64.urlsafe_b64encode(leaf.name.encode()).decode(): json.dumps(leaf.sharding or usual) for leaf in leaves}


def _sharding_json(sharding: Any) -> dict[str, Any] | None:
    """Returns a NamedSharding as Orbax writes it; other shardings are written as one device's."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = sharding.mesh
    ids = np.vectorize(lambda device: device.id, otypes=[object])(mesh.devices)

    def nested(values: Any) -> Any:
        return [nested(value) for value in values] if isinstance(values, (list, np.ndarray)) else {"id": int(values)}

    return {
        "sharding_type": "NamedSharding",
        "shape": [int(size) for size in mesh.devices.shape],
        "axis_names": list(mesh.axis_names),
        "axis_types": [f"AxisType.{axis.name}" for axis in mesh.axis_types],
        "partition_spec": [list(axis) if isinstance(axis, tuple) else axis for axis in sharding.spec],
        "device_mesh": {"mesh": nested(ids)},
    }


def _sync_folder(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


__all__ = ["OrbaxWriter", "save_orbax"]

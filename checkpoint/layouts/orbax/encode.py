"""Trees and leaves as Orbax's layout has them: names, kinds, chunks and its JSON files, as pure
functions.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np

from ...arrays.dtypes import can_store
from ...arrays.sharding import describe_sharding
from ...errors import UnsupportedLeaf
from ...format.grid import Grid, Shape
from ...format.limits import copy_json
from ...format.record import LeafRecord
from ...format.tree import VALUE_TYPES as PYTHON_TYPES
from ...format.tree import stored_form
from ...saving.planner import check_leaf
from ..base import array_record
from . import metadata as orbax
from .metadata import JsonObject, Keys

CHUNK_BYTES = 64 << 20
VALUE_TYPES = {
    "array": "jax.Array",
    "key": "jax.Array",
    "numpy": "np.ndarray",
    "scalar": "np.ndarray",
    "bool": "scalar",
    "int": "scalar",
    "float": "scalar",
    "str": "string",
}
_EMPTY = {
    "dict": "Dict",
    "OrderedDict": "Dict",
    "defaultdict": "Dict",
    "list": "List",
    "tuple": "Tuple",
}
# Of an empty container it is Orbax's word.
Entry: TypeAlias = tuple[Keys, LeafRecord | str]


def walk(node: Any, keys: Keys) -> Iterator[tuple[Keys, int | str]]:
    """Yields (keys, leaf index or Orbax's word for an empty container) of a tree's description, in
    leaf order.
    """
    if node is None:
        yield keys, "None"
    elif isinstance(node, int):
        yield keys, node
    elif not node["nodes"]:
        yield keys, _EMPTY.get(node["kind"], "NamedTuple")
    else:
        names = node.get("keys", range(len(node["nodes"])))
        has_indices = node["kind"] in ("list", "tuple", "object")
        for name, child in zip(names, node["nodes"], strict=True):
            key = (str(name), has_indices and isinstance(name, int))
            yield from walk(child, (*keys, key))


def live_leaf(path: str, value: Any) -> tuple[LeafRecord, Any]:
    """Describes a live leaf; returns with it the array to be written, for a typed key its data."""
    check_leaf(path, value)
    if type(value) in PYTHON_TYPES:
        return LeafRecord(path, type(value).__name__, value=value), None
    if isinstance(value, jax.Array):
        return _live_array(path, value)
    return array_record(path, "numpy", value.shape, value.dtype.name), value


def _live_array(path: str, value: jax.Array) -> tuple[LeafRecord, jax.Array]:
    kind, impl, value = stored_form(value)
    leaf = array_record(path, kind, value.shape, value.dtype.name)
    return replace(leaf, impl=impl, sharding=describe_sharding(value.sharding, value.ndim)), value


def storable(name: str, leaf: LeafRecord) -> LeafRecord:
    """Describes a leaf as it will lie in Orbax's layout, by its name. Raises UnsupportedLeaf."""
    if leaf.kind not in VALUE_TYPES:
        raise UnsupportedLeaf(
            f"Orbax's layout cannot hold '{name}', a Python {leaf.kind}; leave it out or make it an"
            " array or text",
            leaf=name,
            found=leaf.kind,
        )
    if leaf.kind == "str":
        return replace(leaf, path=name)
    if leaf.grid is None:
        return _storable_number(name, leaf)
    if 0 in leaf.shape:
        raise UnsupportedLeaf(
            f"Orbax's layout cannot hold '{name}', an array of shape {leaf.shape}: it has no arrays"
            " of size zero",
            leaf=name,
            found=str(leaf.shape),
        )
    chunk = leaf.grid.shard_shape
    if chunk == leaf.shape:
        chunk = _cut(leaf)
    return replace(leaf, path=name, grid=Grid(leaf.shape, chunk, chunk))


def _storable_number(name: str, leaf: LeafRecord) -> LeafRecord:
    dtype = np.asarray(leaf.value).dtype
    if not can_store(dtype):
        raise UnsupportedLeaf(
            f"Orbax's layout cannot hold '{name}', an int of {leaf.value.bit_length()} bits:"
            " expected at most 64; make it text",
            leaf=name,
            found=leaf.kind,
        )
    return replace(leaf, path=name, dtype=dtype.name, grid=Grid((), (), ()))


def custom_metadata(metadata: Any) -> JsonObject:
    """Returns a user's metadata as Orbax's layout has it: an object of JSON. Raises UnsupportedLeaf
    for anything else, and as `encode_json`.
    """
    plain = copy_json(metadata, "the metadata")
    if plain is None:
        return {}
    if not isinstance(plain, dict):
        raise UnsupportedLeaf(
            f"Orbax's layout cannot hold the metadata, a {type(metadata).__name__}: expected a"
            " dict; put it into one, as in {'value': ...}",
            found=type(metadata).__name__,
        )
    return plain


def chunk_shape(leaf: LeafRecord) -> list[int]:
    assert leaf.grid is not None
    return list(leaf.grid.shard_shape)


def _cut(leaf: LeafRecord) -> Shape:
    """Returns chunks of at most CHUNK_BYTES, cut along leading axes."""
    chunk = list(leaf.shape)
    for axis, size in enumerate(leaf.shape):
        row_bytes = math.prod(leaf.shape[axis + 1 :]) * leaf.numpy_dtype.itemsize
        chunk[axis] = max(1, min(size, CHUNK_BYTES // row_bytes))
        if chunk[axis] > 1:
            break
    return tuple(chunk)


def array_spec(base: Mapping[str, Any], leaf: LeafRecord) -> JsonObject:
    dtype = leaf.numpy_dtype
    return {
        "driver": "zarr",
        "kvstore": dict(base, path=f"{leaf.path}/"),
        "metadata": {
            "shape": list(leaf.shape),
            "chunks": chunk_shape(leaf),
            "dtype": (
                dtype.name
                if dtype.kind == "V" or dtype.name in vars(ml_dtypes)
                else dtype.newbyteorder("<").str
            ),
            "compressor": {"id": "zstd", "level": 1},
            "fill_value": None,
            "order": "C",
        },
        "store_data_equal_to_fill_value": True,
    }


def pointed(strings: Mapping[str, Any]) -> JsonObject:
    """Returns strings as Orbax finds them: their names are JSON pointers."""
    root: JsonObject = {}
    for name, text in strings.items():
        *parents, last = name.split("/")
        level = root
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = text
    return root


def item_files(entries: Iterable[Entry], leaves: Sequence[LeafRecord]) -> JsonObject:
    """Returns the JSON files that describe an item, by their names in its folder."""
    files: JsonObject = {orbax.TREE_METADATA: _tree_metadata(entries)}
    arrays = [leaf for leaf in leaves if VALUE_TYPES[leaf.kind] == "jax.Array"]
    if arrays:
        files[f"{orbax.ARRAY_METADATAS}/process_0"] = _array_metadatas(arrays)
        files[orbax.SHARDING] = _shardings_of(arrays)
    strings = {leaf.path: leaf.value for leaf in leaves if leaf.kind == "str"}
    if strings:
        files[orbax.STRINGS] = pointed(strings)
    return files


def _tree_metadata(entries: Iterable[Entry]) -> JsonObject:
    tree = {}
    for keys, leaf in entries:
        tree[repr(tuple(key for key, _ in keys))] = {
            "key_metadata": [{"key": key, "key_type": 1 if index else 2} for key, index in keys],
            "value_metadata": _value_metadata(leaf),
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _value_metadata(leaf: LeafRecord | str) -> JsonObject:
    if isinstance(leaf, str):
        return {"value_type": leaf, "skip_deserialize": True}
    about: JsonObject = {"value_type": VALUE_TYPES[leaf.kind], "skip_deserialize": False}
    if about["value_type"] == "jax.Array":
        about["write_shape"] = chunk_shape(leaf)
    return about


def _array_metadatas(leaves: Iterable[LeafRecord]) -> JsonObject:
    abouts = [
        {
            "array_metadata": {
                "param_name": leaf.path,
                "write_shape": chunk_shape(leaf),
                "chunk_shape": chunk_shape(leaf),
                "ext_metadata": {"random_key_impl": leaf.impl} if leaf.impl else None,
            }
        }
        for leaf in leaves
    ]
    return {"array_metadatas": abouts}


def _shardings_of(leaves: Iterable[LeafRecord]) -> dict[str, str]:
    names = {device.id: str(device) for device in jax.devices()}
    usual = jax.local_devices()[0].id
    return {
        base64.urlsafe_b64encode(leaf.path.encode()).decode(): json.dumps(
            orbax.sharding_json(leaf.sharding, names, usual)
        )
        for leaf in leaves
    }

"""Trees and leaves as Orbax's layout has them: names, kinds, chunks and its JSON files, as pure
functions.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
from ...saving.planner import check_leaf
from . import metadata as orbax

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
Keys: TypeAlias = tuple[tuple[str, bool], ...]


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
        is_sequence = node["kind"] in ("list", "tuple")
        is_object = node["kind"] == "object"
        for name, child in zip(names, node["nodes"], strict=True):
            is_index = is_sequence or (is_object and isinstance(name, int))
            yield from walk(child, (*keys, (str(name), is_index)))


def leaf_name(keys: Keys) -> str:
    return ".".join(key for key, _ in keys)


def live_leaf(path: str, value: Any) -> tuple[LeafRecord, Any]:
    """Describes a live leaf; returns with it the array to be written, for a typed key its data."""
    check_leaf(path, value)
    if type(value) in PYTHON_TYPES:
        return LeafRecord(path, type(value).__name__, value=value), None
    kind = "numpy"
    impl = ""
    sharding = None
    if isinstance(value, jax.Array):
        kind = "array"
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            kind = "key"
            impl = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        sharding = describe_sharding(value.sharding, value.ndim)
    shape = tuple(value.shape)
    grid = Grid(shape, shape, shape)
    dtype = np.dtype(value.dtype).name
    leaf = LeafRecord(path, kind, dtype, shape, impl=impl, sharding=sharding, grid=grid)
    return leaf, value


def storable(name: str, leaf: LeafRecord) -> LeafRecord:
    """Describes a leaf as it will lie in Orbax's layout, by its name. Raises UnsupportedLeaf."""
    if leaf.kind not in VALUE_TYPES:
        message = (
            f"Orbax's layout cannot hold '{name}', a Python {leaf.kind}; leave it out or make it an"
            " array or text"
        )
        raise UnsupportedLeaf(message, leaf=name, found=leaf.kind)
    if leaf.kind == "str":
        return replace(leaf, path=name)
    if leaf.grid is None:
        dtype = np.asarray(leaf.value).dtype
        if not can_store(dtype):
            raise UnsupportedLeaf(
                f"Orbax's layout cannot hold '{name}', an int of {leaf.value.bit_length()} bits:"
                " expected at most 64; make it text",
                leaf=name,
                found=leaf.kind,
            )
        return replace(leaf, path=name, dtype=dtype.name, grid=Grid((), (), ()))
    if 0 in leaf.shape:
        message = (
            f"Orbax's layout cannot hold '{name}', an array of shape {leaf.shape}: it has no arrays"
            " of size zero"
        )
        raise UnsupportedLeaf(message, leaf=name, found=str(leaf.shape))
    chunk = leaf.grid.shard_shape
    if chunk == leaf.shape:
        chunk = _chunk_shape(leaf.shape, leaf.numpy_dtype.itemsize)
    return replace(leaf, path=name, grid=Grid(leaf.shape, chunk, chunk))


def custom_metadata(metadata: Any) -> dict[str, Any]:
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


def _chunk_shape(shape: Shape, itemsize: int) -> Shape:
    """Returns chunks of at most CHUNK_BYTES, cut along leading axes."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        row_bytes = math.prod(shape[axis + 1 :]) * itemsize
        chunk[axis] = max(1, min(size, CHUNK_BYTES // row_bytes))
        if chunk[axis] > 1:
            break
    return tuple(chunk)


def array_spec(base: Mapping[str, Any], leaf: LeafRecord) -> dict[str, Any]:
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


def pointed(strings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns strings as Orbax finds them: their names are JSON pointers."""
    root: dict[str, Any] = {}
    for name, text in strings.items():
        *parents, last = name.split("/")
        level = root
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = text
    return root


def array_metadatas(leaves: Sequence[LeafRecord]) -> dict[str, Any]:
    def about(leaf: LeafRecord) -> dict[str, Any]:
        extra = {"random_key_impl": leaf.impl} if leaf.impl else None
        return {
            "param_name": leaf.path,
            "write_shape": chunk_shape(leaf),
            "chunk_shape": chunk_shape(leaf),
            "ext_metadata": extra,
        }

    return {"array_metadatas": [{"array_metadata": about(leaf)} for leaf in leaves]}


def shardings_of(leaves: Sequence[LeafRecord]) -> dict[str, str]:
    names = {device.id: str(device) for device in jax.devices()}
    usual = jax.local_devices()[0].id
    texts = {
        leaf.path: json.dumps(orbax.sharding_json(leaf.sharding, names, usual)) for leaf in leaves
    }
    return {base64.urlsafe_b64encode(name.encode()).decode(): text for name, text in texts.items()}

"""Dtypes as they are stored: those of safetensors, and all others as bytes.

The record has the true dtype of each array, and whether it is weak: jax lets an array that was made
of Python numbers take another's dtype.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np

HostArray: TypeAlias = np.ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]

SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# safetensors readers refuse a whole file for one dtype that they do not know: these travel as U8.
_AS_BYTES = (
    "complex128",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
)


_BY_NAME: dict[str, Dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (*SAFETENSORS_NAMES, *_AS_BYTES)
    if hasattr(ml_dtypes, name) or name in np.sctypeDict
}


def dtype_named(name: str) -> Dtype | None:
    """Returns the dtype of a name in a record, or None for a name that is not in the list."""
    return _BY_NAME.get(name)


_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def name_of(dtype: Dtype) -> str:
    """Returns `dtype.name`, which numpy works out anew at every call."""
    return _NAMES.get(dtype) or dtype.name


def can_store(dtype: Dtype) -> bool:
    """Returns whether arrays of this dtype can be saved: little-endian, and in the list."""
    return dtype in _NAMES


def stored_as(dtype: Dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the safetensors dtype and shape of a chunk.

    A dtype that travels as bytes has its last axis in bytes.
    """
    name = SAFETENSORS_NAMES.get(dtype.name)
    if name is not None:
        return name, shape
    if not shape:
        return "U8", (dtype.itemsize,)
    return "U8", (*shape[:-1], shape[-1] * dtype.itemsize)


def is_weak(array: Any) -> bool:
    """Says whether an array of jax, or its description, is of a weak type."""
    return bool(getattr(array, "weak_type", False))


def as_weak(array: jax.Array) -> jax.Array:
    """Returns an array with the same buffers, of a weak type. Nothing is copied or computed."""
    # No call of jax's makes one: what has a weak type is the result of a computation.
    make: Any = type(array)
    shards = [shard.data for shard in array.addressable_shards]
    weak = array.aval.update(weak_type=True)
    made: jax.Array = make(weak, array.sharding, shards, committed=array.committed)
    return made

"""Leaves: Python values, arrays of numpy and of jax, of every dtype, layout and place.

What holdfast cannot save is drawn too: it has to be refused.
"""

from __future__ import annotations

import decimal
import enum
import fractions
import math
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from .places import placements

TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", "a.b", "$bytes", "__metadata__", "format", "step", "\n", "\x7f", "é"]
    ),
    st.text(max_size=4),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=1),
)
SHAPES = st.sampled_from([(), (), (0,), (1,), (3,), (8,), (2, 4), (4, 0), (8, 3), (2, 3, 4)])
_NUMBERS = [0, 1, 2, 3, 7, -1, -7, 100, 255, 256, -129, 65536, 2**24 + 1, 2**31, 2**40]
_FLOATS = [0.0, -0.0, 0.1, 1.5, -2.25, 1e-40, 448.0, 1e5, 3e38, math.inf, -math.inf, math.nan]
_HUGE = [2**63 - 1, 2**63, -(2**63), 2**64, 2**200, -(10**400)]

# As numpy and ml_dtypes have them.
_EXTENSIONS = [
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
    *("float6_e2m3fn", "float6_e3m2fn", "int2", "int4", "uint2", "uint4"),
]
_NATIVE = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
STORABLE = [*_NATIVE, *(getattr(ml_dtypes, name) for name in _EXTENSIONS)]
OTHERS = [">i2", ">f8", ">c8", "g", "G", "M8[ns]", "m8[s]", "U3", ">U2", "S3", "V3", "O"]
STRUCTS = [
    np.dtype([("a", "<i4"), ("b", ">f8")]),
    np.dtype([("a", "<i2", (2,)), ("b", [("c", "S2")])]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype({"names": ["b", "a"], "formats": ["i4", "i2"], "offsets": [4, 0]}),
    np.dtype([("a", ml_dtypes.bfloat16)]),
]
JAX = [
    np.dtype(dtype)
    for dtype in (*"?bBhHiIefF", jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4)
]


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


class Level(enum.IntEnum):
    """An enumeration of ints."""

    LOW = 1


class Mode(enum.StrEnum):
    """An enumeration of texts."""

    FAST = "fast"


class OwnInt(int):
    """An int of a class of one's own."""


class OwnText(str):
    """A text of a class of one's own."""

    __slots__ = ()


PYTHON_VALUES = st.one_of(
    [
        st.booleans(),
        st.sampled_from(_NUMBERS),
        st.sampled_from(_FLOATS),
        st.sampled_from(_HUGE),
        st.builds(pow, st.just(10), st.just(5000)),  # more digits than Python writes
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        TEXTS,
        st.binary(max_size=4),
    ]
)
ODD_VALUES = st.sampled_from(
    [
        Color.RED,
        Level.LOW,
        Mode.FAST,
        OwnInt(3),
        OwnText("own"),
        np.str_("text"),
        np.bytes_(b"bytes"),
        bytearray(b"ab"),
        memoryview(b"ab"),
        decimal.Decimal("1.1"),
        fractions.Fraction(1, 3),
        {1, 2},
        range(3),
        len,
        Color,
        sys.implementation,
    ]
)


def filled(shape: tuple[int, ...], dtype: Any, values: list[Any]) -> np.ndarray[Any, Any]:
    """Returns an array of these values, over and over, as far as the dtype has them."""
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    cycle = [values[index % len(values)] for index in range(count)]
    if dtype.kind in "USOV" and dtype.fields is None and dtype not in map(np.dtype, STORABLE):
        if dtype.kind == "V":
            return np.array([bytes([index % 251] * 3) for index in range(count)], dtype).reshape(
                shape
            )
        return np.array([str(value)[:3] for value in cycle], dtype).reshape(shape)
    with np.errstate(all="ignore"):
        if dtype.fields is not None:
            return np.arange(count, dtype="i1").astype(dtype).reshape(shape)
        numbers = np.array([float(value) for value in cycle])
        if dtype.kind in "Mm":
            return np.arange(count).astype(dtype).reshape(shape)
        if dtype.kind in "?biu":
            bits = 8 * dtype.itemsize
            whole = [int(value) % 2**bits if math.isfinite(value) else 0 for value in cycle]
            return np.array(whole, f"u{dtype.itemsize}").astype(dtype).reshape(shape)
        return numbers.astype(dtype).reshape(shape)


def _laid_out(array: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    """Returns an equal array that lies in memory in another way."""
    match how:
        case "fortran":
            return np.asfortranarray(array)
        case "reversed":
            return array[::-1] if array.ndim else array
        case "sliced":
            return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array
        case "read-only":
            array.flags.writeable = False
        case "unaligned" if not array.dtype.hasobject:
            memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
            moved = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            moved[...] = array
            return moved
        case "broadcast":
            return np.broadcast_to(array, array.shape)
        case "memmap" if array.nbytes and not array.dtype.hasobject:
            with tempfile.TemporaryFile() as file:
                mapped = np.memmap(file, array.dtype, "w+", shape=array.shape)
            mapped[...] = array
            return mapped
        case "masked" if array.dtype.fields is None:
            return np.ma.masked_array(array, np.zeros(array.shape, bool))
        case "matrix" if array.ndim == 2:
            return np.matrix(array)
        case "record" if not isinstance(array, np.matrix):
            return array.view(np.recarray)
    return array


LAYOUTS = st.sampled_from(
    ["plain"] * 6
    + ["fortran", "reversed", "sliced", "read-only", "unaligned", "broadcast", "memmap"]
    + ["masked", "matrix", "record"]
)
_VALUES = st.lists(st.sampled_from(_NUMBERS + _FLOATS), min_size=1, max_size=6)
_DTYPES = st.one_of(st.sampled_from(STORABLE), st.sampled_from(OTHERS), st.sampled_from(STRUCTS))


@st.composite
def numpy_leaves(draw: st.DrawFn) -> Any:
    """Draws arrays and scalars of numpy."""
    array = filled(draw(SHAPES), draw(_DTYPES), draw(_VALUES))
    if draw(st.integers(0, 3)) == 0 and array.size:
        return array.reshape(-1)[0]
    return _laid_out(array, draw(LAYOUTS))


@st.composite
def jax_leaves(draw: st.DrawFn) -> jax.Array:
    """Draws arrays of jax: committed or not, weak, sharded, keys."""
    if draw(st.integers(0, 7)) == 0:
        kind = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))
        key = jax.random.key(draw(st.integers(0, 9)), impl=kind)
        return jax.random.split(key, 3) if draw(st.booleans()) else key
    if draw(st.integers(0, 5)) == 0:
        number = draw(st.sampled_from([1, 1.5, 2j, True, -3]))
        weak = jnp.asarray(number)
        return jnp.broadcast_to(weak, (4,)) if draw(st.booleans()) else weak
    array = filled(draw(SHAPES), draw(st.sampled_from(JAX)), draw(_VALUES))
    return draw(placements(array))


def leaves() -> st.SearchStrategy[Any]:
    """Draws any leaf."""
    return st.one_of(PYTHON_VALUES, numpy_leaves(), jax_leaves(), jax_leaves(), ODD_VALUES)


def is_storable(leaf: Any) -> bool:
    """Says whether a tree may hold such a leaf: it may not be refused then."""
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, np.generic) or type(leaf) in (np.ndarray, np.memmap):
        return any(leaf.dtype == np.dtype(dtype) for dtype in STORABLE)
    if type(leaf) is str:
        return not any(0xD800 <= ord(character) < 0xE000 for character in leaf)
    return type(leaf) in (bool, int, float, complex, bytes)

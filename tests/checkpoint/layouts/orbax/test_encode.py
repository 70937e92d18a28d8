"""Trees and leaves as Orbax's layout has them: pure functions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import UnsupportedLeaf
from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.format.record import LeafRecord
from holdfast.checkpoint.format.tree import describe
from holdfast.checkpoint.layouts.orbax.encode import (
    CHUNK_BYTES,
    chunk_shape,
    live_leaf,
    pointed,
    storable,
    walk,
)
from holdfast.checkpoint.layouts.orbax.metadata import leaf_name


def test_a_tree_is_walked_in_leaf_order() -> None:
    """Keys of dicts and indices of lists, empty containers by Orbax's words; names are the keys
    joined by dots.
    """
    tree = {"a": [np.ones(2), {}], "b": None, "c": (1,), "d": ()}
    description, _ = describe(tree)
    entries = list(walk(description, ()))
    assert [(leaf_name(keys), what) for keys, what in entries] == [
        ("a.0", 0),
        ("a.1", "Dict"),
        ("b", "None"),
        ("c.0", 1),
        ("d", "Tuple"),
    ]
    assert entries[0][0] == (("a", False), ("0", True))


def test_live_leaves_are_described() -> None:
    """A jax array has its sharding and shard, numpy and values are what they are, and a key is its
    data.
    """
    record, value = live_leaf("w", jnp.ones((2, 3)))
    assert (
        (record.kind, record.shape, record.dtype) == ("array", (2, 3), "float32")
        and record.grid == Grid((2, 3), (2, 3), (2, 3))
        and value is not None
    )
    assert live_leaf("n", 3)[0].value == 3 and live_leaf("x", np.ones(2))[0].kind == "numpy"
    record, value = live_leaf("k", jax.random.key(3))
    assert (record.kind, record.impl) == ("key", "threefry2x32") and np.array_equal(
        value, jax.random.key_data(jax.random.key(3))
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [(b"x", "a Python bytes"), (1j, "a Python complex"), (np.zeros((0, 3)), "arrays of size zero")],
)
def test_what_cannot_be_held_is_named(value: Any, reason: str) -> None:
    """Orbax has no bytes, no complex numbers and no empty arrays: UnsupportedLeaf names the
    leaf.
    """
    with pytest.raises(UnsupportedLeaf, match=reason) as caught:
        storable("a.b", live_leaf("a.b", value)[0])
    assert caught.value.leaf == "a.b"


@given(st.lists(st.integers(1, 1 << 12), min_size=1, max_size=4).map(tuple))
def test_chunks_are_bounded(shape: tuple[int, ...]) -> None:
    """A whole array is cut along leading axes into chunks of at most CHUNK_BYTES; an array that
    fits is one chunk.
    """
    leaf = LeafRecord("w", "array", "float32", shape, grid=Grid(shape, shape, shape))
    chunk = chunk_shape(storable("w", leaf))
    assert (
        all(1 <= cut <= size for cut, size in zip(chunk, shape, strict=True))
        and math.prod(chunk) * 4 <= CHUNK_BYTES
    )
    assert math.prod(shape) * 4 > CHUNK_BYTES or tuple(chunk) == shape


def test_strings_are_found_by_pointers() -> None:
    """A name with slashes is a path in the JSON of strings."""
    assert pointed({"a": "x", "b/c": "y", "b/d": "z"}) == {"a": "x", "b": {"c": "y", "d": "z"}}

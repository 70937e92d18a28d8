"""Trees that Orbax can hold, and how two trees are compared bit by bit."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Pair = namedtuple("Pair", "mu nu")


def assert_same(found: Any, expected: Any) -> None:
    """Asserts two trees equal bit by bit: structure, types of containers, dtypes and values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same_leaf(one, two)


def assert_same_leaf(one: Any, two: Any) -> None:
    if hasattr(two, "dtype") and jnp.issubdtype(two.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(one) == jax.random.key_impl(two)
        one = jax.random.key_data(one)
        two = jax.random.key_data(two)
    if hasattr(two, "dtype"):
        one = np.asarray(one)
        two = np.asarray(two)
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.tobytes() == two.tobytes()
    else:
        assert type(one) is type(two) and one == two


def rich_tree() -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    sharded = jax.NamedSharding(mesh, jax.P("d"))
    return {
        "sharded": jax.device_put(jnp.arange(16 * jax.device_count(), dtype=jnp.float32), sharded),
        "list": [jnp.ones((2, 3), jnp.bfloat16), {"x": jnp.int32(3)}],
        "none": None,
        "dict": {},
        "empty": [],
        "tuple": (),
        "pair": Pair(jnp.zeros(2), np.arange(3)),
        "text": "hello",
        "int": 3,
        "float": 2.5,
        "bool": True,
        "a.dot": jnp.ones(2),
        "layer/w": jnp.ones((3, 4)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "f8": jnp.arange(4).astype(jnp.float8_e4m3fn),
        "i4": jnp.arange(4).astype(jnp.int4),
        "c64": jnp.ones(3, jnp.complex64) * 1j,
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
        "zeros": jnp.zeros((5, 5)),
        "np64": np.arange(3, dtype=np.float64),
    }

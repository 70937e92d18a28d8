"""Runs in the processes of tests/system/test_collectives.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from collectives_start import count, index

import holdfast.multihost as multihost


def tree(process):
    nan = np.array([0x7FC00001 + process, 0x80000000], np.uint32).view(np.float32)
    return {
        "i64": np.array([2**62 + process, -process]),
        "nan": nan,
        "f64": np.float64(1e300) + process,
        "bf16": jnp.full((3,), process + 0.5, jnp.bfloat16),
        "bool": [process % 2 == 0, np.array([True, False, process == 1])],
        "c64": np.complex64(1 + process * 1j),
        "u8": np.arange(process, process + 5, dtype=np.uint8),
        "key": jax.random.key(process),
        "empty": np.zeros((0, 3)),
        "none": None,
    }


def bits(leaf):
    leaf = np.asarray(
        jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and leaf.dtype == jax.random.key(0).dtype
        else leaf
    )
    return leaf.dtype, leaf.shape, leaf.tobytes()


for source in range(count):
    found = multihost.broadcast_one_to_all(tree(index), is_source=index == source)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, tree(source)), (source, found)
assert multihost.broadcast_one_to_all({}) == {}
assert multihost.global_max([index, -index, 7 - index, -(2**31), 2**31 - 1]) == [
    count - 1,
    0,
    7,
    -(2**31),
    2**31 - 1,
]
assert multihost.global_max([]) == []
assert type(multihost.global_max([index])[0]) is int
multihost.shutdown()

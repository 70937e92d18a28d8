"""What programs of tests/system/test_accelerator.py begin with."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

root = sys.argv[1]
device = jax.devices()[0]


def tree(mib, seed=0):
    make = jax.jit(lambda n: jnp.full((4 << 18,), n, jnp.float32))
    return jax.block_until_ready({f"l{i}": make(i + seed) for i in range(mib // 4)})


def same(got, want):
    assert set(got) == set(want)
    assert all(bool((got[name] == want[name]).all()) for name in want)

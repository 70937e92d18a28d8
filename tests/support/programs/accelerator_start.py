"""What programs of tests/system/test_accelerator.py begin with."""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp

root = sys.argv[1]
device = jax.devices()[0]
# The kit on a CPU has a tenth of the sizes.
SHARE = 10 if os.environ.get("ACCELERATOR_KIT") == "cpu" else 1


@jax.jit
def bits(seed):
    """Returns a MiB of f32 whose bits differ from place to place, NaNs and -0.0 among them."""
    words = jax.lax.iota(jnp.uint32, 4 << 16) * jnp.uint32(2654435761) + jnp.uint32(seed)
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def tree(mib, seed=0):
    """Returns so many MiB on the device, 4 a leaf."""
    leaves = max(1, mib // SHARE // 4)
    grow = jax.jit(lambda n: jnp.concatenate([bits(4 * n + part) for part in range(4)]))
    return jax.block_until_ready({f"l{i}": grow(i + seed) for i in range(leaves)})


@jax.jit
def _differs(one, other):
    words = [jax.lax.bitcast_convert_type(each, jnp.uint32) for each in (one, other)]
    return (words[0] != words[1]).any()


def same(got, want):
    """Asserts that all bits are the same."""
    assert set(got) == set(want)
    assert not any(bool(_differs(got[name], want[name])) for name in want)

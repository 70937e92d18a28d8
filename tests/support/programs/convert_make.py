"""Runs in the processes of tests/checkpoint/tools/test_convert.py."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.checkpoint import save

mesh = jax.make_mesh((4,), ("d",))
rng = np.random.default_rng(0)
rows = jax.NamedSharding(mesh, jax.P(None, "d"))
tree = {
    f"w{i}": jax.device_put(rng.random((2048, 4096 - i % 3 * 4), np.float32), rows)
    for i in range(30)
}
tree |= {
    "long": jnp.asarray(rng.random((8191, 2049), np.float32)),
    "small": [jnp.full((3, i % 7 + 1), i) for i in range(500)],
}
assert sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) > 1000 << 20
save(sys.argv[1], tree, step=5)

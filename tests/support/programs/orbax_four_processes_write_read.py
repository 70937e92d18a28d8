"""Runs in the processes of tests/system/test_orbax.py."""

from __future__ import annotations

import sys

import jax
import numpy as np

from holdfast.checkpoint import load, save

index = int(sys.argv[1])
count = int(sys.argv[2])
path = sys.argv[3]
port = sys.argv[4]
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
mesh = jax.make_mesh((8,), ("d",))
sharding = jax.NamedSharding(mesh, jax.P("d"))
whole = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
array = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
other = jax.make_array_from_callback(
    whole.shape, jax.NamedSharding(mesh, jax.P()), lambda i: whole[i] + 1
)
save(path, {"sharded": array, "replicated": other, "step": 5}, layout="orbax")
like = jax.ShapeDtypeStruct(
    whole.shape, np.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "d"))
)
back = load(path, {"sharded": like, "replicated": like, "step": 0})
for shard in back["sharded"].addressable_shards:
    assert (np.asarray(shard.data) == whole[shard.index]).all()
print("exact", back["step"])

"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import root
from sharded_state import mesh, state

from holdfast.checkpoint import CheckpointManager, KeepLast

with CheckpointManager(root, keep_policy=KeepLast(2)) as manager:
    assert manager.latest_step() == 10
    like = {
        "w": jax.ShapeDtypeStruct(
            (8, 1 << 10), jnp.float32, sharding=NamedSharding(mesh, P(None, "x"))
        ),
        "r": jax.ShapeDtypeStruct((1 << 10,), jnp.float32, sharding=NamedSharding(mesh, P("x"))),
        "n": np.int32(0),
        "name": "",
    }
    got = manager.restore(10, like=like)
    want = np.arange(8 << 10, dtype=np.float32).reshape(8, 1 << 10) + 10
    for shard in got["w"].addressable_shards:
        assert np.array_equal(np.asarray(shard.data), want[shard.index])
    manager.save(12, state(12))

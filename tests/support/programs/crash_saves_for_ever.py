"""Runs in the processes of tests/system/test_crash.py."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import root
from sharded_state import mesh

from holdfast.checkpoint import CheckpointManager, KeepLast

whole = np.arange(4 * 3_250_000, dtype=np.float32).reshape(4, 3_250_000)
sharding = NamedSharding(mesh, P("x"))
with CheckpointManager(root, keep_policy=KeepLast(2)) as manager:
    for step in range(1, 1000):
        w = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i] + step)
        manager.save(step, {"w": w, "step": step})
        manager.wait_until_finished()
        print("acknowledged", step, flush=True)

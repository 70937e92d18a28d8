"""Runs in the processes of tests/system/test_leaving.py."""

from __future__ import annotations

import os
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from holdfast import checkpoint, multihost

index, count, address, root, leaves = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
multihost.initialize(address, count, index)
mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
spec = {"replicated": P(), "sharded": P("x")}
whole = np.arange(count << 22, dtype=np.float32).reshape(count, -1)
state = {
    name: jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, spec[name]), lambda place: whole[place]
    )
    for name in leaves.split(",")
}


def hold(progress):
    print("writes", flush=True)
    while not os.path.exists(root + "/go"):
        time.sleep(0.02)


manager = checkpoint.CheckpointManager(
    root + "/run", save_policy=checkpoint.OnPreemption(), options=checkpoint.Options(progress=hold)
)
step = 0
while not manager.reached_preemption(step):
    step += 1
    if step == 3:
        print("steps", flush=True)
    time.sleep(0.02)
    manager.save(step, state)
try:
    manager.wait_until_finished()
    print("committed", step, flush=True)
except checkpoint.SaveFailed as error:
    print("failed", error, flush=True)
os._exit(0)

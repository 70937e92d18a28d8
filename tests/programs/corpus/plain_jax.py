"""Linear regression in plain jax, its batches split over all devices of all processes."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

folder = sys.argv[1]
steps = int(sys.argv[2])

multihost.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
everywhere = NamedSharding(mesh, PartitionSpec())
by_rows = NamedSharding(mesh, PartitionSpec("data"))


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(12, 4)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32) + 0.1
    return tuple(jax.make_array_from_callback(a.shape, by_rows, a.__getitem__) for a in (x, y))


@jax.jit
def train(params, x, y):
    def loss_of(params):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), loss


params = jax.jit(lambda: {"w": jnp.zeros(4), "b": jnp.zeros(())}, out_shardings=everywhere)()
first = 1
manager = CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(3))
with manager:
    if manager.latest_step() is not None:
        params = manager.restore(like=params)
        first = manager.latest_step() + 1
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, steps + 1):
        params, loss = train(params, *batch(step))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, params, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

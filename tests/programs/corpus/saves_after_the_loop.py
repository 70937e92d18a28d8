"""Saves its last step once more when the loop is over, whatever the loop has saved."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Json, KeepLast

multihost.initialize()
last_step = int(sys.argv[2])
manager = CheckpointManager(sys.argv[1], save_policy=EveryNSteps(8), keep_policy=KeepLast(2))


@jax.jit
def train(weights, x):
    def loss_of(weights):
        error = jnp.sin(x @ weights["in"]) @ weights["out"] - x.sum(1, keepdims=True)
        return jnp.mean(error**2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, slope: weight - 0.02 * slope, weights, gradient), loss


def save(step, weights, seen):
    return manager.save(step, items={"weights": weights, "data": Json({"seen": seen})})


keys = jax.random.split(jax.random.key(7))
weights = {"in": jax.random.normal(keys[0], (3, 16)), "out": jax.random.normal(keys[1], (16, 1))}
step = 0
seen = 0
if manager.latest_step() is not None:
    step = manager.latest_step()
    weights = manager.restore(step, weights, item="weights")
    seen = manager.restore(step, item="data")["seen"]
    print(f"resumed from step {step}", flush=True)

while step < last_step:
    step += 1
    x = np.random.default_rng(step).normal(size=(12, 3)).astype(np.float32)
    weights, loss = train(weights, x)
    seen += len(x)
    if jax.process_index() == 0:
        print(f"step {step} loss {loss:.5f}", flush=True)
    save(step, weights, seen)
    if manager.reached_preemption(step):
        print(f"stops after step {step}", flush=True)
        break
    time.sleep(0.03)  # a larger model's step

save(step, weights, seen)
manager.close()
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

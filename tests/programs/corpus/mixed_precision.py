"""Computes in bfloat16 with a loss scale; saves float32 master weights, and bfloat16 to publish."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


def fresh():
    keys = jax.random.split(jax.random.key(5))
    master = {
        "in": jax.random.normal(keys[0], (4, 16)) / 2,
        "out": jax.random.normal(keys[1], (16, 1)) / 4,
    }
    return {"master": master, "scale": jnp.float32(1024), "good": jnp.int32(0)}


def to_half(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


@jax.jit
def train(state, x, y):
    def loss_of(half):
        predicted = jax.nn.relu(x.astype(jnp.bfloat16) @ half["in"]) @ half["out"]
        loss = jnp.mean((predicted[:, 0].astype(jnp.float32) - y) ** 2)
        return loss * state["scale"], loss

    (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(to_half(state["master"]))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state["scale"], grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    master = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.05 * g, p), state["master"], grads)
    good = jnp.where(finite, state["good"] + 1, 0)
    scale = jnp.where(finite, jnp.where(good % 10 == 0, 2.0, 1.0), 0.5) * state["scale"]
    return {"master": master, "scale": scale, "good": good}, loss


multihost.initialize()
state = fresh()
first = 1
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(5), keep_policy=KeepLast(2)) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        state = manager.restore(first - 1, state, item="train")
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        x = np.random.default_rng(step).normal(size=(12, 4)).astype(np.float32)
        state, loss = train(state, x, np.abs(x).sum(axis=1))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        items = {"train": state, "publish": to_half(state["master"])}
        manager.save(step, items=items, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

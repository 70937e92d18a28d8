"""Keeps the two steps with the best accuracy beside the newest, and ends with the best."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepAnyOf, KeepBest, KeepLast

folder = sys.argv[1]
steps = int(sys.argv[2])
keep = KeepAnyOf(KeepLast(2), KeepBest(2, "accuracy", mode="max"))


def points(seed, count=64):
    x = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] > 0).astype(np.float32)


def features(x):
    return jnp.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 1], jnp.ones(len(x))], axis=1)


@jax.jit
def train(w, x, y):
    def loss_of(w):
        logits = features(x) @ w
        return jnp.mean(jnp.logaddexp(0, logits) - y * logits)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 2.0 * grad + 0.3 * jnp.sin(100 * w), loss  # it wanders on purpose


@jax.jit
def accuracy_of(w, x, y):
    return jnp.mean((features(x) @ w > 0) == (y > 0.5))


multihost.initialize()
w = jnp.array([2.0, -1.0, 0.0, 0.5])
validation = points(10_000, 200)
first = 1
with CheckpointManager(folder, save_policy=EveryNSteps(2), keep_policy=keep) as manager:
    if manager.latest_step() is not None:
        w = manager.restore(like=w)
        first = manager.latest_step() + 1
        print(f"resumed from step {first - 1}", flush=True)
    preempted = False
    for step in range(first, steps + 1):
        w, loss = train(w, *points(step))
        accuracy = float(accuracy_of(w, *validation))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f} accuracy {accuracy:.3f}", flush=True)
        manager.save(step, w, metrics={"loss": float(loss), "accuracy": accuracy})
        if preempted := manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
    manager.wait_until_finished()
    if not preempted:
        best = manager.best_step()
        again = float(accuracy_of(manager.restore(best, w), *validation))
        if jax.process_index() == 0:
            print(f"best step {best}, accuracy {again:.3f}", flush=True)
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

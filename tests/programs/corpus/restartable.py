"""Survivors stay: a process that dies is replaced, and the others call `train` again."""

import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


@functools.cache
def dataset():
    """Loaded once in the life of a process."""
    x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    return x, np.maximum(x[:, 0], x[:, 1])


def train(folder, steps):
    x, y = dataset()

    @jax.jit
    def update(w, x, y):
        def loss_of(w):
            return jnp.mean((jnp.max(x[:, :, None] * w, axis=(1, 2)) - y) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    with CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
        last = manager.latest_step() or 0
        if last:
            w = manager.restore(last, w)
            print(f"resumed from step {last}", flush=True)
        for step in range(last + 1, steps + 1):
            chosen = np.random.default_rng(step).choice(len(x), 12, replace=False)
            w, loss = update(w, x[chosen], y[chosen])
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, w, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    return manager.statistics()


if __name__ == "__main__":
    statistics = multihost.run_restartable(lambda: train(sys.argv[1], int(sys.argv[2])))
    print("statistics", json.dumps(statistics))

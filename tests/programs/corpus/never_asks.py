"""A loop that saves, and never asks whether the machine is to be given back."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps

multihost.initialize()


@jax.jit
def train(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(axis=1)) ** 2))(w)
    return w - 0.1 * grad, loss


w = jnp.zeros(3)
first = 1
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(10)) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        w = manager.restore(like=w)
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        x = np.random.default_rng(step).normal(size=(12, 3)).astype(np.float32)
        w, loss = train(w, x)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, w, metrics={"loss": float(loss)})
        time.sleep(0.03)  # a larger model's step
multihost.shutdown()

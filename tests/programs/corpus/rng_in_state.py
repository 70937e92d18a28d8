"""All randomness is in the state: a jax key for dropout, numpy's generator for the data."""

import json
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Json, KeepLast


class State(NamedTuple):
    w: jax.Array
    key: jax.Array


@jax.jit
def train(state, x):
    key, dropout = jax.random.split(state.key)

    def loss_of(w):
        kept = jax.random.bernoulli(dropout, 0.8, x.shape)
        return jnp.mean((jnp.where(kept, x / 0.8, 0) @ w - x[:, 0]) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state.w)
    return State(state.w - 0.1 * grad, key), loss


multihost.initialize()
data = np.random.default_rng(11)  # every process draws the same batches
state = State(jnp.zeros(6), jax.random.key(0, impl="rbg"))
first = 1
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(3), keep_policy=KeepLast(2)) as manager:
    if manager.latest_step() is not None:
        last = manager.latest_step()
        state = manager.restore(last, state)
        data.bit_generator.state = manager.restore(last, Json, item="data")
        first = last + 1
        print(f"resumed from step {last}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        state, loss = train(state, data.normal(size=(12, 6)).astype(np.float32))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        items = {"state": state, "data": Json(data.bit_generator.state)}
        manager.save(step, items=items, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

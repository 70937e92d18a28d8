"""Weight decay for matrices alone: `optax.masked` leaves holes in its state."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

folder = sys.argv[1]
steps = int(sys.argv[2])


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def not_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim != 2, params)


optimizer = optax.chain(
    optax.masked(optax.scale_by_adam(), is_matrix),
    optax.masked(optax.trace(0.9), not_matrix),
    optax.masked(optax.add_decayed_weights(1e-2), is_matrix),
    optax.scale(-0.02),
)


def init(key):
    keys = jax.random.split(key, 2)
    return [
        {"w": jax.random.normal(keys[0], (4, 8)) / 2, "b": jnp.zeros(8)},
        {"w": jax.random.normal(keys[1], (8, 2)) / 3, "b": jnp.zeros(2)},
    ]


@jax.jit
def train(params, state, x):
    def loss_of(params):
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
        out = hidden @ params[1]["w"] + params[1]["b"]
        return jnp.mean((out - x[:, :2] * x[:, 2:]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


multihost.initialize()
params = init(jax.random.key(3))
opt_state = optimizer.init(params)
manager = CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(4))
first = 1
if manager.latest_step() is not None:
    both = manager.restore(items={"params": params, "optimizer": opt_state})
    params = both["params"]
    opt_state = both["optimizer"]
    first = manager.latest_step() + 1
    print(f"resumed from step {first - 1}", flush=True)
for step in range(first, steps + 1):
    x = np.random.default_rng(step).uniform(-1, 1, size=(24, 4)).astype(np.float32)
    params, opt_state, loss = train(params, opt_state, x)
    if jax.process_index() == 0:
        print(f"step {step} loss {loss:.5f}", flush=True)
    manager.save(
        step,
        items={"params": params, "optimizer": opt_state},
        metrics={"loss": float(loss)},
    )
    if manager.reached_preemption(step):
        print(f"stops after step {step}", flush=True)
        break
    time.sleep(0.03)  # a larger model's step
manager.wait_until_finished()
manager.close()
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

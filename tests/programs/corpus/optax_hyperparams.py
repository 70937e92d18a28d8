"""The learning rate is a part of the state: it is set by hand, and falls where the loss stays."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

folder = sys.argv[1]
steps = int(sys.argv[2])

optimizer = optax.chain(
    optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    optax.contrib.reduce_on_plateau(factor=0.5, patience=4, rtol=0.05),
)


@jax.jit
def train(params, state, x):
    def loss_of(params):
        return jnp.mean((jnp.sin(x * params["a"]) * params["b"] - jnp.sin(2 * x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state, loss


multihost.initialize()
params = {"a": jnp.float32(1.3), "b": jnp.float32(0.2)}
state = optimizer.init(params)
first = 1
with CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
    if manager.latest_step() is not None:
        params, state = manager.restore(like=(params, state))
        first = manager.latest_step() + 1
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, steps + 1):
        if step == 25:
            state[0].hyperparams["learning_rate"] = jnp.asarray(0.02)
        x = np.random.default_rng(step).uniform(-3, 3, 32).astype(np.float32)
        params, state, loss = train(params, state, x)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
            if step % 10 == 0:
                rate = float(state[0].hyperparams["learning_rate"] * state[1].scale)
                print(f"learning rate {rate:.4f}", flush=True)
        manager.save(step, (params, state), metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

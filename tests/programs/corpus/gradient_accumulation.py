"""Gradients of four small batches make one update; a save may come between two of them."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

optimizer = optax.MultiSteps(optax.adam(5e-2), every_k_schedule=4)


@jax.jit
def micro_step(params, opt_state, x):
    def loss_of(params):
        return jnp.mean((jnp.cos(x * params["frequency"]) * params["size"] - jnp.cos(2 * x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


multihost.initialize()
params = {"frequency": jnp.float32(1.5), "size": jnp.float32(0.5)}
opt_state = optimizer.init(params)
first = 1
manager = CheckpointManager(sys.argv[1], save_policy=EveryNSteps(5), keep_policy=KeepLast(2))
try:
    if (last := manager.latest_step()) is not None:
        params, opt_state = manager.restore(last, (params, opt_state))
        first = last + 1
        print(f"resumed from step {last}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        x = np.random.default_rng(step).uniform(-1, 1, 12).astype(np.float32)
        params, opt_state, loss = micro_step(params, opt_state, x)
        if jax.process_index() == 0:
            whole = int(opt_state.gradient_step)
            print(f"step {step} loss {loss:.5f} updates {whole}", flush=True)
        manager.save(step, (params, opt_state), metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
finally:
    manager.close()
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

"""An exponential average of the weights beside the weights; the average is what is evaluated."""

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
optimizer = optax.sgd(0.2, momentum=0.9)
average = optax.ema(0.9)


@jax.jit
def train(state, x, y):
    def loss_of(params):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(grads, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    _, ema = average.update(params, state["ema"])
    return {"params": params, "optimizer": opt_state, "ema": ema}, loss


multihost.initialize()
keys = jax.random.split(jax.random.key(0))
params = {
    "w": jax.random.normal(keys[0], (3, 8)),
    "v": jax.random.normal(keys[1], (8,)) / 8,
}
state = {"params": params, "optimizer": optimizer.init(params), "ema": average.init(params)}
first = 1
with CheckpointManager(folder, save_policy=EveryNSteps(4), keep_policy=KeepLast(3)) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        state = manager.restore(first - 1, state)
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, steps + 1):
        x = np.random.default_rng(step).normal(size=(12, 3)).astype(np.float32)
        state, loss = train(state, x, np.sin(x.sum(axis=1)))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, state, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
    else:
        manager.wait_until_finished()
        # An evaluation needs the average alone.
        ema = manager.restore(like={"ema": state["ema"]}, partial=True)["ema"]
        size = float(optax.tree.norm(ema.ema))
        print(f"norm of the average: {size:.4f}", flush=True)
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

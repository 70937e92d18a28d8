"""Logistic regression by a chain of Optax: clipped gradients, AdamW, warm-up and cosine decay."""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import checkpoint, multihost

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("steps", type=int)
args = parser.parse_args()

schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=8, decay_steps=60)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3))
target = np.linspace(-1, 1, 6).astype(np.float32)


def loss_of(params, x, y):
    return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], y).mean()


@jax.jit
def update(state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, loss


multihost.initialize()
params = {"w": jnp.zeros(6), "b": jnp.zeros(())}
state = {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
with checkpoint.CheckpointManager(
    args.folder,
    save_policy=checkpoint.EveryNSteps(8),
    keep_policy=checkpoint.KeepLast(2),
) as manager:
    if manager.latest_step() is not None:
        state = manager.restore(like=state)
        print(f"resumed from step {state['step']}", flush=True)
    while state["step"] < args.steps:
        step = int(state["step"]) + 1
        x = np.random.default_rng(step).normal(size=(32, 6)).astype(np.float32)
        state, loss = update(state, x, (x @ target > 0).astype(np.float32))
        if multihost.is_primary_host(0):
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, state, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

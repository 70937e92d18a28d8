"""A sweep of ten learning rates, four steps each, every one in a folder of its own below one."""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepBest

RATES = np.geomspace(0.01, 0.5, 10)
EACH = 4


@jax.jit
def train(w, x, rate):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - x[:, 0] + x[:, 2]) ** 2))(w)
    return w - rate * grad, loss


multihost.initialize()
steps = int(sys.argv[2])
results = {}
for number, rate in enumerate(RATES):
    begin = number * EACH  # steps count through the whole sweep
    if begin >= steps:
        break
    root = Path(sys.argv[1]) / f"rate-{rate:.3f}"
    keep = KeepBest(1, "loss", mode="min")
    with CheckpointManager(root, save_policy=EveryNSteps(1), keep_policy=keep) as manager:
        w = jnp.zeros(3)
        last = manager.latest_step() or begin
        if last > begin:
            w = manager.restore(last, w)
        for step in range(last + 1, begin + EACH + 1):
            x = np.random.default_rng(step).normal(size=(12, 3)).astype(np.float32)
            w, loss = train(w, x, rate)
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, w, metrics={"loss": float(loss)}, metadata={"rate": float(rate)})
            if manager.reached_preemption(step):
                break
            time.sleep(0.03)  # a larger model's step
        manager.wait_until_finished()
        results[f"{rate:.3f}"] = manager.metrics(manager.best_step())["loss"]
        if multihost.preemption_notice():
            break
if jax.process_index() == 0:
    print("results", json.dumps(results), flush=True)
multihost.shutdown()

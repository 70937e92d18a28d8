"""Saves by the clock, keeps by several rules, and skips a save while the last one is in flight."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import (
    AnyOf,
    CheckpointManager,
    EveryNSeconds,
    EveryNSteps,
    KeepAnyOf,
    KeepEvery,
    KeepLast,
    OnPreemption,
    Options,
)

folder = sys.argv[1]
steps = int(sys.argv[2])


@jax.jit
def anneal(x, key, step):
    """One step of simulated annealing on a bumpy function of many variables."""

    def height(x):
        return jnp.mean(x**2 - 0.5 * jnp.cos(8 * x))

    proposed = x + jax.random.normal(key, x.shape) * 0.02
    better = height(proposed) < height(x)
    return jnp.where(better, proposed, x), height(x)


multihost.initialize()
x = jnp.asarray(np.linspace(-2, 2, 1000, dtype=np.float32))
first = 1
with CheckpointManager(
    folder,
    save_policy=AnyOf(EveryNSeconds(0.3), EveryNSteps(20), OnPreemption()),
    keep_policy=KeepAnyOf(KeepLast(2), KeepEvery(20)),
    options=Options(on_busy="skip"),
) as manager:
    if manager.latest_step() is not None:
        x = manager.restore(like=x)
        first = manager.latest_step() + 1
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, steps + 1):
        x, loss = anneal(x, jax.random.fold_in(jax.random.key(7), step), step)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, x, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

"""A program that was written for Orbax, with its import changed and nothing else."""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.compat import orbax as ocp

folder = os.path.abspath(sys.argv[1])
steps = int(sys.argv[2])


@jax.jit
def train(params, x):
    def loss_of(params):
        return jnp.mean((x @ params["w"] - x.sum(axis=1)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


multihost.initialize()
params = {"w": jnp.zeros(5)}
options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=5)
with ocp.CheckpointManager(folder, options=options) as manager:
    step = manager.latest_step() or 0
    if step:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, params)
        params = manager.restore(step, args=ocp.args.StandardRestore(abstract))
        print(f"resumed from step {step}", flush=True)
    while step < steps:
        step += 1
        x = np.random.default_rng(step).normal(size=(20, 5)).astype(np.float32)
        params, loss = train(params, x)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, args=ocp.args.StandardSave(params), metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
    manager.wait_until_finished()
multihost.shutdown()

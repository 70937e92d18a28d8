"""A perceptron of Flax NNX with dropout: the counts of its random streams are saved too."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))[:, 0]


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


folder = sys.argv[1]
steps = int(sys.argv[2])
multihost.initialize()
model = Net(nnx.Rngs(params=0, dropout=1))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
with CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
    first = 1
    if manager.latest_step() is not None:
        likes = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        restored = manager.restore(items=likes)
        nnx.update(model, restored["model"])
        nnx.update(optimizer, restored["optimizer"])
        first = manager.latest_step() + 1
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, steps + 1):
        rng = np.random.default_rng(step)
        x = rng.normal(size=(12, 4)).astype(np.float32)
        loss = train_step(model, optimizer, x, np.sin(x).sum(axis=1))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        items = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        manager.save(step, items=items, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

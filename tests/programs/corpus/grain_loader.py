"""Data of grain, shuffled and repeated: its iterator is saved with the model.

Every process reads the same batches, so any process's place in the data does for all.
"""

import json
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


class Numbers(grain.sources.RandomAccessDataSource):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.array([index / 100, (index % 7) / 7], np.float32)


def batches():
    data = grain.MapDataset.source(Numbers()).seed(3).shuffle().repeat()
    return iter(data.batch(12).to_iter_dataset())


@nnx.jit
def train(model, optimizer, batch):
    def loss_of(model):
        return jnp.mean((model(batch[:, :1])[:, 0] - batch[:, 1]) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


multihost.initialize()
model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.Param)
reader = batches()
first = 1
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
    if manager.latest_step() is not None:
        last = manager.latest_step()
        likes = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        restored = manager.restore(last, items=likes)
        nnx.update(model, restored["model"])
        nnx.update(optimizer, restored["optimizer"])
        manager.restore(last, reader, item="reader", process=0)
        first = last + 1
        print(f"resumed from step {last}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        loss = train(model, optimizer, next(reader))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        items = {
            "model": nnx.state(model),
            "optimizer": nnx.state(optimizer),
            "reader": reader,
        }
        manager.save(step, items=items, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

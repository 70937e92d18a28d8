"""An Equinox model: its arrays are saved, its static part is made anew."""

import json
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

folder = sys.argv[1]
steps = int(sys.argv[2])
optimizer = optax.sgd(0.05, momentum=0.9)


@eqx.filter_jit
def train_step(model, state, x, y):
    def loss_of(model):
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


multihost.initialize()
model = eqx.nn.MLP(3, 1, width_size=8, depth=2, key=jax.random.key(4))
state = optimizer.init(eqx.filter(model, eqx.is_array))
manager = CheckpointManager(folder, save_policy=EveryNSteps(4), keep_policy=KeepLast(2))
start = 0
if (last := manager.latest_step()) is not None:
    arrays, static = eqx.partition(model, eqx.is_array)
    restored = manager.restore(last, {"model": arrays, "optimizer": state})
    model = eqx.combine(restored["model"], static)
    state = restored["optimizer"]
    start = last
    print(f"resumed from step {last}", flush=True)
for step in range(start + 1, steps + 1):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    model, state, loss = train_step(model, state, x, x.prod(axis=1))
    if jax.process_index() == 0:
        print(f"step {step} loss {loss:.5f}", flush=True)
    manager.save(
        step,
        {"model": eqx.filter(model, eqx.is_array), "optimizer": state},
        metrics={"loss": float(loss)},
    )
    if manager.reached_preemption(step):
        print(f"stops after step {step}", flush=True)
        break
    time.sleep(0.03)  # a larger model's step
manager.close()
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

"""A Haiku model with state: an exponential average beside its parameters."""

import json
import sys
import time

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


def net(x):
    mean = hk.ExponentialMovingAverage(0.9, name="input_mean")
    x = x - mean(x.mean(axis=0))
    return hk.nets.MLP([8, 1])(x)[:, 0]


model = hk.without_apply_rng(hk.transform_with_state(net))
optimizer = optax.rmsprop(1e-2)


@jax.jit
def train_step(params, state, opt_state, x, y):
    def loss_of(params):
        out, new_state = model.apply(params, state, x)
        return jnp.mean((out - y) ** 2), new_state

    (loss, state), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), state, opt_state, loss


def main():
    folder = sys.argv[1]
    steps = int(sys.argv[2])
    multihost.initialize()
    params, state = model.init(jax.random.PRNGKey(42), jnp.zeros((1, 5)))
    opt_state = optimizer.init(params)
    last = 0
    with CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
        if manager.latest_step():
            last = manager.latest_step()
            params, state, opt_state = manager.restore(last, (params, state, opt_state))
            print(f"resumed from step {last}", flush=True)
        for step in range(last + 1, steps + 1):
            rng = np.random.default_rng(step)
            x = rng.normal(2.0, 1.0, size=(16, 5)).astype(np.float32)
            params, state, opt_state, loss = train_step(
                params, state, opt_state, x, np.abs(x).max(axis=1)
            )
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, (params, state, opt_state), metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    print("statistics", json.dumps(manager.statistics()))
    multihost.shutdown()


main()

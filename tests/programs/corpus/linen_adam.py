"""A small convolutional net of Flax linen, with batch statistics, trained by Adam."""

import json
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(x.mean(axis=(1, 2)))


class State(TrainState):
    batch_stats: dict


def batch(step):
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 3, 12)
    images = rng.normal(size=(12, 6, 6, 1)) + labels[:, None, None, None]
    return images.astype(np.float32), labels


@jax.jit
def train_step(state, images, labels):
    def loss_of(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def main(folder, steps):
    multihost.initialize()
    net = Net()
    variables = net.init(jax.random.key(0), jnp.zeros((1, 6, 6, 1)), train=False)
    state = State.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adam(3e-2),
    )
    with CheckpointManager(folder, save_policy=EveryNSteps(10), keep_policy=KeepLast(2)) as manager:
        if manager.latest_step() is not None:
            state = manager.restore(like=state)
            print(f"resumed from step {int(state.step)}", flush=True)
        for step in range(int(state.step) + 1, steps + 1):
            state, loss = train_step(state, *batch(step))
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, state, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    print("statistics", json.dumps(manager.statistics()))
    multihost.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

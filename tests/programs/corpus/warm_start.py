"""Ten steps of pretraining, and then a model with another head, which takes the body over."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, Options

PRETRAINING = 10


def body(seed):
    return jax.random.normal(jax.random.key(seed), (4, 8)) / 2


def batch(step):
    return np.random.default_rng(step).normal(size=(12, 4)).astype(np.float32)


@jax.jit
def train(params, x, y):
    def loss_of(params):
        return jnp.mean((jnp.tanh(x @ params["body"]["kernel"]) @ params["head"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def run(root, params, steps, target):
    """Goes on with a stage; returns its parameters and whether it was stopped."""
    policies = {"save_policy": EveryNSteps(5), "keep_policy": KeepLast(2)}
    with CheckpointManager(root, **policies) as manager:
        if manager.latest_step() is not None:
            params = manager.restore(like=params)
            steps = range(manager.latest_step() + 1, steps.stop)
        for step in steps:
            x = batch(step)
            params, loss = train(params, x, target(x))
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, params, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                return params, True
            time.sleep(0.03)  # a larger model's step
    return params, False


def main(folder, steps):
    params = {"body": {"kernel": body(0)}, "head": jnp.zeros((8, 4))}
    _, stopped = run(folder / "pretrained", params, range(1, PRETRAINING + 1), np.tanh)
    if stopped:
        return
    # The head has another shape, so the body alone is taken; what a `like` lacks is not read.
    with CheckpointManager(folder / "pretrained", options=Options(read_only=True)) as manager:
        like = {"body": {"kernel": body(0)}}
        taken = manager.restore(PRETRAINING, like, partial=True)
    params = {**taken, "head": jnp.zeros((8, 1))}
    tuning = range(PRETRAINING + 1, steps + 1)
    run(folder / "tuned", params, tuning, lambda x: x[:, :1] * x[:, 1:2])


if __name__ == "__main__":
    multihost.initialize()
    main(Path(sys.argv[1]), int(sys.argv[2]))
    multihost.shutdown()

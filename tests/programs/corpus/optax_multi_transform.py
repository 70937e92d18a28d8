"""Another optimizer for each part of a model, and an embedding that stays as it is."""

import json
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8, name="embed")(tokens)
        x = nn.relu(nn.Dense(16, name="body")(x))
        return nn.Dense(3, name="head")(x)


def labels(params):
    parts = {"embed": "frozen", "body": "adam", "head": "sgd"}
    return {"params": {name: parts[name] for name in params["params"]}}


optimizer = optax.multi_transform(
    {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1, momentum=0.9), "frozen": optax.set_to_zero()},
    labels,
)
model = Tagger()


@jax.jit
def train_step(params, opt_state, tokens):
    def loss_of(params):
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens % 3).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(folder, steps):
    params = model.init(jax.random.key(0), jnp.zeros((1, 5), jnp.int32))
    opt_state = optimizer.init(params)
    policies = {"save_policy": EveryNSteps(5), "keep_policy": KeepLast(3)}
    with CheckpointManager(folder, **policies) as manager:
        last = manager.latest_step()
        if last is not None:
            restored = manager.restore(last, {"params": params, "opt_state": opt_state})
            params = restored["params"]
            opt_state = restored["opt_state"]
            print(f"resumed from step {last}", flush=True)
        for step in range((last or 0) + 1, steps + 1):
            tokens = np.random.default_rng(step).integers(0, 16, (6, 5))
            params, opt_state, loss = train_step(params, opt_state, tokens)
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            state = {"params": params, "opt_state": opt_state}
            manager.save(step, state, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    print("statistics", json.dumps(manager.statistics()))


multihost.initialize()
train(sys.argv[1], int(sys.argv[2]))
multihost.shutdown()

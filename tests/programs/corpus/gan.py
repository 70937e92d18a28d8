"""Two networks against each other, each with an optimizer of its own: four items of a step."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, Options

forger_optimizer = optax.adam(2e-2, b1=0.5)
judge_optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


def forge(forger, noise):
    return noise * forger["scale"] + forger["shift"]


def score(judge, x):
    return jnp.tanh(x[:, None] * judge["a"] + judge["b"]) @ judge["c"]


@jax.jit
def train(game, real, noise):
    def judge_loss(judge):
        fake = forge(game["forger"], noise)
        return jnp.mean(jax.nn.softplus(-score(judge, real)) + jax.nn.softplus(score(judge, fake)))

    def forger_loss(forger):
        return jnp.mean(jax.nn.softplus(-score(game["judge"], forge(forger, noise))))

    loss, grads = jax.value_and_grad(judge_loss)(game["judge"])
    updates, judge_state = judge_optimizer.update(grads, game["judge_state"])
    judge = optax.apply_updates(game["judge"], updates)
    updates, forger_state = forger_optimizer.update(
        jax.grad(forger_loss)(game["forger"]), game["forger_state"]
    )
    return {
        "judge": judge,
        "judge_state": judge_state,
        "forger": optax.apply_updates(game["forger"], updates),
        "forger_state": forger_state,
    }, loss


multihost.initialize()
keys = jax.random.split(jax.random.key(3), 3)
names = zip("abc", keys, strict=True)
judge = {name: jax.random.normal(key, (6,)) for name, key in names}
forger = {"scale": jnp.float32(1), "shift": jnp.float32(0)}
game = {
    "judge": judge,
    "judge_state": judge_optimizer.init(judge),
    "forger": forger,
    "forger_state": forger_optimizer.init(forger),
}
last = 0
with CheckpointManager(
    sys.argv[1],
    save_policy=EveryNSteps(5),
    keep_policy=KeepLast(2),
    options=Options(step_format="step_{:d}"),
) as manager:
    if manager.latest_step() is not None:
        last = manager.latest_step()
        game = manager.restore(last, items=game)
        print(f"resumed from step {last}", flush=True)
    for step in range(last + 1, int(sys.argv[2]) + 1):
        rng = np.random.default_rng(step)
        real = rng.normal(3.0, 0.5, 12).astype(np.float32)
        game, loss = train(game, real, rng.normal(size=12).astype(np.float32))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, items=game, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

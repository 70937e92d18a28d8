"""LoRA: a frozen base, of which nothing is saved, and adapters, of which everything is."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

WIDTH = 16
RANK = 2


def pretrained():
    """Stands for a large model that lies elsewhere."""
    keys = jax.random.split(jax.random.key(42), 3)
    return {f"layer{n}": jax.random.normal(key, (WIDTH, WIDTH)) / 4 for n, key in enumerate(keys)}


def adapters(base):
    key = jax.random.key(0)
    return {
        name: {"a": jax.random.normal(key, (WIDTH, RANK)) / 4, "b": jnp.zeros((RANK, WIDTH))}
        for name in base
    }


def forward(base, lora, x):
    for name, kernel in base.items():
        x = jnp.tanh(x @ (kernel + lora[name]["a"] @ lora[name]["b"]))
    return x


def main(folder, steps):
    base = pretrained()
    lora = adapters(base)
    optimizer = optax.adamw(3e-2)
    opt_state = optimizer.init(lora)

    @jax.jit
    def train(lora, opt_state, x):
        def loss_of(lora):
            return jnp.mean((forward(base, lora, x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(lora)
        updates, opt_state = optimizer.update(grads, opt_state, lora)
        return optax.apply_updates(lora, updates), opt_state, loss

    with CheckpointManager(folder, save_policy=EveryNSteps(2), keep_policy=KeepLast(5)) as manager:
        last = manager.latest_step() or 0
        if last:
            likes = {"lora": lora, "optimizer": opt_state}
            restored = manager.restore(last, items=likes)
            lora = restored["lora"]
            opt_state = restored["optimizer"]
            print(f"resumed from step {last}", flush=True)
        for step in range(last + 1, steps + 1):
            x = np.random.default_rng(step).uniform(-0.5, 0.5, (12, WIDTH)).astype(np.float32)
            lora, opt_state, loss = train(lora, opt_state, x)
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(
                step,
                items={"lora": lora, "optimizer": opt_state},
                metrics={"loss": float(loss)},
                metadata={"base": "pretrained-42", "rank": RANK},
            )
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    print("statistics", json.dumps(manager.statistics()))


if __name__ == "__main__":
    multihost.initialize()
    main(sys.argv[1], int(sys.argv[2]))
    multihost.shutdown()

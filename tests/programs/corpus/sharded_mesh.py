"""Parameters split over all devices. `like` is shapes: a restore makes no second copy of them."""

import json
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

WIDTH = 24  # divides by 1, 2 and 3 devices


def init():
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "in": jax.random.normal(keys[0], (4, WIDTH)) / 2,
        "out": jax.random.normal(keys[1], (WIDTH, 4)) / 5,
        "momentum": {"in": jnp.zeros((4, WIDTH)), "out": jnp.zeros((WIDTH, 4))},
    }


def main(folder, steps):
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))
    specs = {"in": P(None, "model"), "out": P("model", None)}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    shardings["momentum"] = dict(shardings)
    everywhere = NamedSharding(mesh, P())

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, everywhere))
    def train(state, x):
        weights = {"in": state["in"], "out": state["out"]}

        def loss_of(weights):
            return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - x[:, ::-1]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        new = jax.tree.map(lambda w, m: w - 0.05 * m, weights, momentum)
        return {**new, "momentum": momentum}, loss

    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
        shardings,
    )
    policies = {"save_policy": EveryNSteps(5), "keep_policy": KeepLast(2)}
    with CheckpointManager(folder, **policies) as manager:
        last = manager.latest_step() or 0
        if last:
            state = manager.restore(last, like)
            print(f"resumed from step {last}", flush=True)
        else:
            state = jax.jit(init, out_shardings=shardings)()
        for step in range(last + 1, steps + 1):
            x = np.random.default_rng(step).normal(size=(12, 4)).astype(np.float32)
            state, loss = train(
                state, jax.make_array_from_callback(x.shape, everywhere, x.__getitem__)
            )
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, state, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    print("statistics", json.dumps(manager.statistics()))


if __name__ == "__main__":
    multihost.initialize()
    main(sys.argv[1], int(sys.argv[2]))
    multihost.shutdown()

"""Each process has two devices; a batch's rows come from the process that holds them."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from holdfast import multihost
from holdfast.checkpoint import SAVED, CheckpointManager, EveryNSteps, KeepLast

ROWS = 12

jax.config.update("jax_num_cpu_devices", 2)
multihost.initialize()
mesh = jax.make_mesh(
    (jax.process_count(), jax.local_device_count()),
    ("host", "device"),
    axis_types=(AxisType.Auto,) * 2,
)
rows = NamedSharding(mesh, P(("host", "device")))
columns = NamedSharding(mesh, P(None, "device"))


def batch(step):
    """The rows of this process, put together with those of the others."""
    count = ROWS // jax.process_count()
    begin = jax.process_index() * count
    mine = np.random.default_rng(step).normal(size=(ROWS, 4))[begin : begin + count]
    return jax.make_array_from_process_local_data(rows, mine.astype(np.float32), (ROWS, 4))


@jax.jit
def train(w, x):
    def loss_of(w):
        return jnp.mean((x @ w - jnp.roll(x, 1, axis=1)) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return jax.lax.with_sharding_constraint(w - 0.5 * grad, columns), loss


w = jax.device_put(np.zeros((4, 4), np.float32), columns)
first = 1
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(5), keep_policy=KeepLast(2)) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        w = manager.restore(first - 1, like=w)
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        w, loss = train(w, batch(step))
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, w, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
    manager.wait_until_finished()
    again = manager.restore(like=SAVED)  # as this job has saved it
    assert again.sharding.is_equivalent_to(w.sharding, 2)
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()

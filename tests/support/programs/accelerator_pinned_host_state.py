"""Saves state of which a part lives in `pinned_host`, donates it at once, restores it and goes
on.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_start import SHARE, device, root
from jax.sharding import SingleDeviceSharding

from holdfast.checkpoint import CheckpointManager

SIZE = (64 << 20) // SHARE // 4
on_device = SingleDeviceSharding(device)
on_host = SingleDeviceSharding(device, memory_kind="pinned_host")


@jax.jit
def advance(params, moment, step):
    moment = moment * 0.5 + step
    return params + moment, moment


def fresh():
    params = jnp.arange(SIZE, dtype=jnp.float32)
    return {"params": params, "moment": jax.device_put(params * 3, on_host)}


def train(state, step):
    """Computes on the device; the moment comes from the host, and goes back. Both are donated."""
    moment = jax.device_put(state["moment"], on_device)
    params, moment = advance(state["params"], moment, step)
    for old in state.values():
        old.delete()
    return {"params": params, "moment": jax.device_put(moment, on_host)}


want = fresh()
for step in range(1, 5):
    want = train(want, step)

state = fresh()
with CheckpointManager(root) as manager:
    for step in range(1, 3):
        state = train(state, step)
        began = time.perf_counter()
        manager.save(step, state)
        print(f"save {step} blocked {(time.perf_counter() - began) * 1e3:.1f} ms")
        if step == 1:
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
                state,
            )
    state = train(state, 3)
with CheckpointManager(root) as manager:
    got = manager.restore(2, like)
assert got["moment"].sharding.memory_kind == "pinned_host", got["moment"].sharding
for step in range(3, 5):
    got = train(got, step)
for name, value in want.items():
    assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name

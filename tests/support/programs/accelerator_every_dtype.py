"""Saves random bits of every dtype, and compares each byte of what is restored on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_start import device, root

from holdfast.checkpoint import CheckpointManager

DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 float16 bfloat16 float32 complex64"
DTYPES += " float8_e4m3fn float8_e5m2"
random = np.random.default_rng(7)


def draw(name):
    dtype = jnp.dtype(name)
    raw = random.integers(0, 2 if name == "bool" else 256, 1031 * dtype.itemsize, np.uint8)
    return raw.view(dtype)


host = {name: draw(name) for name in DTYPES.split()}
state = {name: jax.device_put(value, device) for name, value in host.items()}
state["key"] = jax.random.key(3)
state["empty"] = jnp.zeros((0, 4))
state["scalar"] = jnp.float32(-0.0)
with CheckpointManager(root) as manager:
    manager.save(1, state)
    manager.wait_until_finished()
    got = manager.restore(1, like=state)
for name, value in host.items():
    assert got[name].devices() == {device}, name
    assert np.asarray(got[name]).tobytes() == value.tobytes(), name
assert (jax.random.key_data(got["key"]) == jax.random.key_data(state["key"])).all()
assert got["empty"].shape == (0, 4)
assert np.signbit(np.asarray(got["scalar"]))

"""A state that is spread over all devices of a job, and what programs ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import joined  # noqa: F401 the mesh has all devices of the job
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("x",))


def state(step: int, size: int = 1 << 10) -> dict[str, Any]:
    """Returns an array of [devices, size] f32 sharded over the devices, one that is replicated, a
    count on this process's own device, and a name.
    """
    devices = len(jax.devices())
    whole = np.arange(devices * size, dtype=np.float32).reshape(devices, size) + step

    def put(value: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {"w": put(whole, P("x")), "r": put(whole[0], P()), "n": jnp.int32(step), "name": "net"}


def same(got: dict[str, Any], step: int, size: int = 1 << 10) -> bool:
    """Asserts that a restored state is that of the step, bit for bit and on the same devices."""
    want = state(step, size)
    for key in ("w", "r"):
        assert got[key].sharding == want[key].sharding
        shards = zip(got[key].addressable_shards, want[key].addressable_shards, strict=True)
        for own, wanted in shards:
            assert np.array_equal(np.asarray(own.data), np.asarray(wanted.data)), (key, step)
    assert int(got["n"]) == step and got["name"] == "net"
    return True


def goes(call: Callable[[], object], kind: type[BaseException]) -> BaseException:
    """Returns the error that a call raises; ends the program where it raises none."""
    try:
        call()
    except kind as error:
        print("caught", type(error).__name__, error, flush=True)
        return error
    raise SystemExit(f"no {kind.__name__}")

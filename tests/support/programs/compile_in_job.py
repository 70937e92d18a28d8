"""Computes in a job, and prints what jax's cache was asked for. Stays until argv[3] is there."""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from holdfast import multihost

seen = collections.Counter[str]()


def count(event: str, **_: str | int) -> None:
    """Counts an event of jax by the last part of its name."""
    seen[event.rsplit("/", 1)[1]] += 1


jax.monitoring.register_event_listener(count)
multihost.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))  # type: ignore[no-untyped-call]
x = jax.jit(lambda: jnp.arange(8.0) + 3, out_shardings=sharding)()
assert float(jax.jit(lambda x: jnp.sum(x * 2))(x)) == 104.0
names = ("compile_requests_use_cache", "cache_hits", "cache_misses")
print("counted", *(seen[name] for name in names), flush=True)
while not Path(sys.argv[3]).exists():
    time.sleep(0.05)
multihost.shutdown()

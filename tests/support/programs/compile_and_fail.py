"""Prints what jax's compile cache was asked for, and what it had; the first attempt fails."""

from __future__ import annotations

import collections
import os
import sys

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
attempt = os.environ["HOLDFAST_ATTEMPT"]
counts = [seen[name] for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")]
print([attempt, *counts], flush=True)
multihost.shutdown()
sys.exit(attempt == "1")

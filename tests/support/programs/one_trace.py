"""Saves and restores as one of several processes; prints its spans."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast import checkpoint, multihost

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)

index, count, port = map(int, sys.argv[1:4])
multihost.initialize(f"127.0.0.1:{port}", count, index)
mesh = jax.make_mesh((jax.device_count(),), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
state = jax.jit(lambda: jnp.arange(32.0), out_shardings=sharding)()
with checkpoint.CheckpointManager(sys.argv[4]) as manager:
    manager.save(1, {"w": state})
    manager.wait_until_finished()
    manager.restore(1, {"w": state})
multihost.shutdown()
for span in spans.get_finished_spans():
    print("span", span.to_json(indent=None), flush=True)

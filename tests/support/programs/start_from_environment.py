"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import os

import jax
from starting import count, index

import holdfast.multihost as multihost

multihost.initialize(timeout_s=60)
assert jax.process_count() == count == multihost.process_count() and jax.process_index() == index
assert multihost.is_initialized() and multihost.current_spec().attempt == 4
assert multihost.runtime_to_distributed_ids() == [0, 1, 2]
assert multihost.distributed_to_device_ids()[index] == [device.id for device in jax.local_devices()]
assert not jax.config.jax_enable_preemption_service
assert "--xla_cpu_collective_timeout_seconds=100" in os.environ["XLA_FLAGS"], os.environ[
    "XLA_FLAGS"
]
group = multihost.default_group()
assert group.gather("g", b"%d" % index, timeout_s=30) == (
    [b"0", b"1", b"2"] if index == 0 else None
)
group.report(step=7)
try:
    multihost.initialize()
except RuntimeError as error:
    assert "has joined a job already" in str(error)
multihost.shutdown()
multihost.shutdown()
assert not multihost.is_initialized() and not multihost.is_runtime_to_distributed_ids_initialized()

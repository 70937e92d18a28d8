"""Runs in the processes of tests/system/test_coordinator_restart.py."""

from __future__ import annotations

import sys
import time

import jax

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=1000)
from jax._src import distributed

client = distributed.global_state.client
for step in range(200):
    deadline = time.monotonic() + 60
    while True:
        try:
            client.wait_at_barrier(f"step/{step % 7}", 60_000)
            break
        except jax.errors.JaxRuntimeError as error:
            assert "UNAVAILABLE" in str(error) and time.monotonic() < deadline, error
            time.sleep(0.05)
    if step % 50 == 0:
        print("step", step, flush=True)
print("all steps", flush=True)
jax.distributed.shutdown()

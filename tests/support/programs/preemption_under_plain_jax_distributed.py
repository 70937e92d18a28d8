"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point
from preemption_start import address, count, index

from holdfast import multihost

assert not multihost.reached_preemption(-1)  # before jax.distributed: of this process alone
jax.distributed.initialize(address, count, index)
client = jax._src.distributed.global_state.client
ours = None
theirs = None
step = 0
print("ready", flush=True)
while ours is None or theirs is None:
    if ours is None and multihost.reached_preemption(step):
        ours = step
    if reached_preemption_sync_point(step):
        theirs = step
    client.wait_at_barrier(f"step {step}", 60_000)
    step += 1
print(f"stopped at {ours}, stopped at {theirs}")

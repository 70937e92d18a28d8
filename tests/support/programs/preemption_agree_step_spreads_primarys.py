"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import random
import time

import jax
from preemption_start import address, count, index

from holdfast import multihost

jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(address, count, index)
client = jax._src.distributed.global_state.client
group = multihost.ClusterGroup(client, index, count)
random.seed(index)
steps = []
with multihost.agree_on_step(group, "save") as sync:
    for step in range(150):
        if index == 0 and step % 30 == 10:
            sync.propose()
        if sync.reached(step):
            steps.append(step)
        time.sleep(random.random() * 0.01)
    client.wait_at_barrier("asked", 60_000)
assert 3 <= len(steps) <= 5 and sync.statistics()["rounds"] == 5, (steps, sync.statistics())
print(f"steps {steps}")
client.wait_at_barrier("done", 60_000)
jax.distributed.shutdown()

"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import threading

import jax.numpy as jnp
from jax.experimental import multihost_utils
from preemption_start import begin, end, index

from holdfast import multihost

begin()
if index == 1:
    threading.Timer(0.5, multihost.notify_preemption, [multihost.Notice("drained")]).start()
step = 0
while not multihost.reached_preemption(step):
    multihost_utils.broadcast_one_to_all(jnp.ones(4))
    step += 1
print(f"stopped at {step}")
end()

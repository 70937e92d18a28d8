"""Runs in the processes of tests/system/test_survival.py."""

from __future__ import annotations

import os
import sys

import jax

from holdfast import multihost

multihost.initialize()
print(f"process {jax.process_index()} of {jax.process_count()}, pid {os.getpid()}", flush=True)
step = 0
while not multihost.reached_preemption(step):
    step += 1
    if os.environ["HOLDFAST_ATTEMPT"] == "2" and step == 100:
        break
multihost.shutdown()
sys.exit(0)

"""Runs in the processes of tests/system/test_health.py."""

from __future__ import annotations

import os
import time

from health_start import group, index

from holdfast import multihost

with multihost.agree_on_step(group, "soon") as sync:
    assert not sync.reached(0)
    group.barrier("asked", timeout_s=60)
    print("begun", flush=True)
    if index == 2:
        time.sleep(1000)
    while 2 not in multihost.health().failed():
        time.sleep(0.01)
    if index == 0:
        sync.propose()
    step = 1
    while not sync.reached(step):
        time.sleep(0.01)
        step += 1
print("agreed", flush=True)
os._exit(0)

"""Runs in the processes of tests/system/test_preemption.py."""

from __future__ import annotations

import logging
import os
import time

from preemption_start import address, count, index

from holdfast import multihost

logged = []


class Keep(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())


logging.getLogger("holdfast").addHandler(Keep())
multihost.initialize(address, count, index, heartbeat_timeout_s=8, preemption_sources=[])
assert not multihost.reached_preemption(0)
print("begun", flush=True)
try:
    multihost.sync_global_processes("gone", timeout=30)
except Exception:
    multihost.notify_preemption(multihost.Notice("drained"))
step = 1
while step < 100 or not any("the notice cannot be passed on" in line for line in logged):
    assert not multihost.reached_preemption(step)
    time.sleep(0.01)
    step += 1
print("answered", flush=True)
os._exit(0)

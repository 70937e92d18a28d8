"""Runs in the processes of tests/system/test_stalls.py."""

from __future__ import annotations

import os
import time

from holdfast import multihost

multihost.initialize()
attempt, me = (int(os.environ[f"HOLDFAST_{name}"]) for name in ("ATTEMPT", "PROCESS_ID"))
for step in range(3):
    multihost.reached_preemption(step)
    time.sleep(0.1)
    if (attempt, me, step) == (1, 1, 1):
        time.sleep(600)
    multihost.sync_global_processes(f"step {step}")
multihost.shutdown()

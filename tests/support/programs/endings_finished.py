"""The one process of a job of tests/system/test_endings.py: saves with metrics, leaves its job, and
lives on.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, KeepBest
from holdfast.coordination import StatusClient

address = os.environ["HOLDFAST_COORDINATOR"]
multihost.initialize()
with CheckpointManager(sys.argv[1], keep_policy=KeepBest(3, "loss")) as manager:
    for step, loss in ((1, 0.7), (2, 0.5), (3, 0.6)):
        manager.reached_preemption(step)
        manager.save(step, {"w": np.arange(8)}, metrics={"loss": loss})
# What is reported is at the coordinator before it is known there that the process leaves.
with StatusClient(address) as client:
    deadline_s = time.monotonic() + 30
    steps = client.status().tasks[0].progress.root.steps
    while len(steps) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.05)
        steps = client.status().tasks[0].progress.root.steps
best = [step for step in steps if step.best]
print(f"step {best[0].step} is the best of {len(steps)}, by {best[0].metrics['loss']}", flush=True)
multihost.shutdown()
time.sleep(0.5)  # the launcher has seen that it leaves
print("it has left its job", flush=True)

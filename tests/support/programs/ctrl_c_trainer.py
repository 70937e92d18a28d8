"""Trains until it is told to stop. argv[2] is "asks", or "deaf": then it never asks about that, and
calls `save` at each step.
"""

from __future__ import annotations

import itertools
import sys
import time

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps

multihost.initialize()
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(1_000_000)) as manager:
    for step in itertools.count(1):
        time.sleep(0.05)
        if sys.argv[2] == "asks" and manager.reached_preemption(step):
            manager.save(step, {"w": step})
            sys.exit(75)
        if sys.argv[2] == "deaf" and manager.save(step, {"w": step}):
            print("saves a step", flush=True)
        if step == 3:
            print("it goes", flush=True)

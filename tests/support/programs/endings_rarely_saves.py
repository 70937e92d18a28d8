"""Trains for seven steps under a policy that saves none of them."""

from __future__ import annotations

import sys

import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps

folder, asks = sys.argv[1:]
multihost.initialize()
with CheckpointManager(folder, save_policy=EveryNSteps(10_000)) as manager:
    for step in range(1, 8):
        if asks == "save":
            manager.save(step, {"w": np.zeros(1)})
        elif manager.should_save(step):
            raise AssertionError("that one is not due")
multihost.shutdown()

"""Runs in the processes of tests/system/test_local_tier.py."""

from __future__ import annotations

import os
import sys

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local

index = int(sys.argv[1])
address = sys.argv[3]
folder = sys.argv[4]
multihost.initialize(address, 2, index)
local = Local(
    os.path.join(folder, f"h{index}"),
    save_policy=EveryNSteps(1),
    failure_domain=f"h{index}",
    strict=True,
)
with CheckpointManager(
    os.path.join(folder, "root"), save_policy=EveryNSteps(1000), local=local
) as manager:
    step = 0
    while not manager.local_steps():
        step += 1
        manager.save(step, {"step": step})
        manager.wait_until_finished()
    assert manager.statistics()["local_survives"] == 1
multihost.shutdown()

"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import sys
import time

from joined import index, root
from sharded_state import state

from holdfast.checkpoint import (
    CheckpointManager,
    EveryNSeconds,
    EveryNSteps,
    Options,
    SaveForGoodput,
)
from holdfast.checkpoint.scheduling import goodput

# The first save would come after a minute.
goodput.FIRST_S = 0.2
policy, options = {
    "clock": (EveryNSeconds(0.2), Options()),
    "goodput": (SaveForGoodput(mtbf_s=2.0), Options()),
    "load": (EveryNSteps(3), Options(on_busy="skip")),
}[sys.argv[5]]
with CheckpointManager(root, save_policy=policy, options=options) as manager:
    step = 0
    saved = []
    while step < 2000 and len(saved) < 4:
        time.sleep(0.002 * (index + 1))
        if manager.save(step, state(step)):
            saved.append(step)
        step += 1
    manager.wait_until_finished()
    assert saved == manager.all_steps() and len(saved) == 4, (saved, manager.all_steps())
    print("saved", saved)

"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import os
import signal
import time

from joined import index, root
from sharded_state import state

from holdfast.checkpoint import CheckpointManager, EveryNSteps

with CheckpointManager(root, save_policy=EveryNSteps(1_000_000)) as manager:
    saved = []
    for step in range(1, 100_000):
        if step == 20 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if manager.save(step, state(step)):
            saved.append(step)
        if manager.reached_preemption(step):
            break
        time.sleep(0.001 * (1 + index))
    manager.wait_until_finished()
    assert saved == [step] == manager.all_steps(), (saved, step)
    print("stopped at", step, flush=True)

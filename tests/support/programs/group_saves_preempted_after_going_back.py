"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import os
import signal
import time

from joined import index, root
from sharded_state import state

from holdfast.checkpoint import CheckpointManager, EveryNSeconds

with CheckpointManager(root, save_policy=EveryNSeconds(0.2)) as manager:
    for step in range(1, 10_001):
        assert not manager.reached_preemption(step)
    manager.save(200, state(200), force=True)
    manager.restore(200, state(200))
    saved = []
    for step in range(201, 10_000):
        if manager.save(step, state(step)):
            saved.append(step)
        if len(saved) == 2 and index == 1 and saved[-1] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        if manager.reached_preemption(step):
            break
        time.sleep(0.001 * (1 + index))
    manager.wait_until_finished()
    assert len(saved) >= 2 and step < 9_999, (saved, step)
    print("saved", saved, "stopped at", step, flush=True)

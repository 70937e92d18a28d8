"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import root
from sharded_state import goes, state

from holdfast.checkpoint import CheckpointManager, EveryNSteps, StepExists


def opened() -> CheckpointManager:
    return CheckpointManager(root, save_policy=EveryNSteps(2))


with opened() as manager:
    for step in range(1, 5):
        manager.save(step, state(step))
    assert not manager.save(4, state(4))
with opened() as manager:
    goes(lambda: manager.save(4, state(4)), StepExists)
    manager.restore(like=state(0))
    assert not manager.save(4, state(4))
    assert manager.all_steps() == [2, 4], manager.all_steps()
    assert manager.save(6, state(6))

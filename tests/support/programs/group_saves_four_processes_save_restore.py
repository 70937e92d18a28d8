"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import root
from sharded_state import goes, same, state

from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, StepExists

with CheckpointManager(root, save_policy=EveryNSteps(2), keep_policy=KeepLast(2)) as manager:
    saved = [step for step in range(9) if manager.save(step, state(step), metrics={"loss": step})]
    assert saved == [0, 2, 4, 6, 8], saved
    manager.wait_until_finished()
    assert manager.all_steps() == [6, 8] and manager.latest_step() == 8
    got = goes(lambda: manager.save(8, state(8), force=True), StepExists)
    assert got.step == 8
    assert same(manager.restore(like=state(0)), 8) and same(manager.restore(6, like=state(0)), 6)
    assert manager.restore()["w"].shape == (8, 1 << 10)
    manager.save(10, state(10))
    manager.delete(8)
    assert manager.all_steps() == [10]

"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import index, root
from sharded_state import goes, state

from holdfast.checkpoint import CheckpointManager, CommitUnknown
from holdfast.checkpoint.agreement.save_protocol import Failed, Hear, ReadRecord, RecordUnreadable
from holdfast.checkpoint.saving import commit

with CheckpointManager(root) as manager:
    manager.save(1, state(1))
    manager.wait_until_finished()
    perform = commit.EffectPerformer.perform

    def deaf(part, effect):
        event = perform(part, effect)
        if isinstance(effect, Hear):
            return Failed(TimeoutError("nothing came"))
        return RecordUnreadable() if isinstance(effect, ReadRecord) else event

    if index == 1:
        commit.EffectPerformer.perform = deaf
    manager.save(2, state(2))
    if index == 1:
        goes(manager.wait_until_finished, CommitUnknown)
        commit.EffectPerformer.perform = perform
        assert manager.all_steps() == [1]
    manager.save(3, state(3))
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3], manager.all_steps()

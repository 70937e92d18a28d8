"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import count, index, root
from sharded_state import goes, same, state

from holdfast.checkpoint import CheckpointManager, Options, SaveFailed

options = Options(save_timeout_s=30, on_save_error="warn", max_missed_saves=2)
with CheckpointManager(root, options=options) as manager:
    storage = manager._root.storage
    write = storage.write

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    def save(step):
        manager.save(step, state(step))
        manager._join_lanes()

    # One disk is full, then another, and the third time all of them.
    for step, full_disks in ((1, {1}), (2, {0}), (3, set(range(count)))):
        storage.write = full if index in full_disks else write
        save(step)
        counts = manager.statistics()
        assert counts["saves_failed"] == step and counts["saves_missed"] == min(step, 2), counts
    error = goes(manager.check_for_errors, SaveFailed)
    assert "step 3 was not saved: process 0 failed: OSError" in str(error), error
    storage.write = write
    save(4)
    manager.check_for_errors()
    # A mistake of one is raised by all; the tree differs.
    save_5 = state(5) | ({"more": 1.0} if index == 1 else {})
    manager.save(5, save_5)
    manager._join_lanes()
    goes(manager.check_for_errors, SaveFailed)
    storage.write = full if index == 1 else write
    save(6)
    manager.check_for_errors()
    error = goes(manager.wait_until_finished, SaveFailed)
    assert error.process == 1, error
    storage.write = write
    save(7)
    assert manager.all_steps() == [4, 7] and same(manager.restore(7, like=state(0)), 7)

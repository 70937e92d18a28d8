"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import index, root
from sharded_state import goes, state

from holdfast.checkpoint import CheckpointManager, Options, SaveFailed

manager = CheckpointManager(root, options=Options(save_timeout_s=3))
manager.save(1, state(1))
manager.wait_until_finished()
if index != 1:
    manager.save(2, state(2))
    error = goes(manager.wait_until_finished, SaveFailed)
    assert error.process == 1 and manager.latest_step() == 1, error
    manager._root.group.barrier("end", timeout_s=60)
else:
    manager._root.group.barrier("end", timeout_s=60)
manager.close()

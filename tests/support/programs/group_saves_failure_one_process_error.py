"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import jax.numpy as jnp
from joined import index, root
from sharded_state import goes, same, state

from holdfast.checkpoint import CheckpointManager, Options, SaveFailed, UnsupportedLeaf

with CheckpointManager(root, options=Options(save_timeout_s=30)) as manager:
    manager.save(1, state(1))
    manager.wait_until_finished()
    if index == 2:
        write = manager._root.storage.write

        def full(*args, **options):
            raise OSError(28, "No space left on device")

        manager._root.storage.write = full
    manager.save(2, state(2))
    error = goes(manager.wait_until_finished, SaveFailed)
    assert error.process == 2 and "process 2 failed: OSError: [Errno 28] No space left" in str(
        error
    ), error
    if index == 2:
        manager._root.storage.write = write
    assert manager.latest_step() == 1
    different = state(3) | ({"more": jnp.zeros(3)} if index == 1 else {})
    manager.save(3, different)
    error = goes(manager.wait_until_finished, SaveFailed)
    assert error.process == 1, error
    if index == 3:
        goes(lambda: manager.save(4, state(4) | {"bad": object()}), UnsupportedLeaf)
    else:
        manager.save(4, state(4))
        error = goes(manager.wait_until_finished, SaveFailed)
        assert error.process == 3 and "bad" in str(error), error
    manager.save(2, state(2))
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 2] and same(manager.restore(2, like=state(0)), 2)

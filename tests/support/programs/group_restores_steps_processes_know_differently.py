"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

import numpy as np
from group_restores_start import shards
from joined import index, root
from sharded_state import goes

from holdfast.checkpoint import CheckpointError, CheckpointManager

with CheckpointManager(root) as manager:
    manager.save(1, shards(1))
    manager.wait_until_finished()
    manager.save(2, shards(2))
    manager.wait_until_finished()
    if index == 1:
        manager._state.index.remove([2])  # as after CommitUnknown: the record appeared later
        assert manager.latest_step() == 1
    for fallback in (False, True):
        got = manager.restore(like=shards(0), fallback=fallback)
        assert int(np.asarray(got["w"].addressable_shards[0].data)[0, 0]) == 2 + (index << 10)
    error = goes(lambda: manager.restore(manager.latest_step(), shards(0)), CheckpointError)
    assert error.process == 1, error

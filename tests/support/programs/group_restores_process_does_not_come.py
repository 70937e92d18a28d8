"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

from group_restores_start import shards
from joined import index, root
from sharded_state import goes

from holdfast.checkpoint import CheckpointManager, Options
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import sync_global_processes

with CheckpointManager(root, options=Options(restore_timeout_s=2)) as manager:
    manager.save(1, shards(1))
    manager.wait_until_finished()
    if index != 1:
        error = goes(lambda: manager.restore(1, shards(0)), BarrierTimeout)
        assert error.missing == (1,), error.missing
    sync_global_processes("end", timeout=60)

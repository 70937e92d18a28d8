"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

from group_restores_start import shards
from joined import index, root
from sharded_state import goes

from holdfast.checkpoint import CheckpointError, CheckpointManager

with CheckpointManager(root) as manager:
    manager.save(1, shards(1))
    manager.wait_until_finished()
    listing = manager._root.storage.list
    if index == 0:

        def list(folder, **options):
            raise PermissionError(13, "Permission denied", root)

        manager._root.storage.list = list
    for fallback in (False, True):
        error = goes(lambda: manager.restore(like=shards(0), fallback=fallback), CheckpointError)
        assert "Permission denied" in str(error) and root in str(error), error
    manager._root.storage.list = listing
    manager.restore(like=shards(0))

"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

import numpy as np
from group_restores_start import shards
from joined import index, root
from sharded_state import goes

from holdfast.checkpoint import CheckpointManager, Options, StepGone, save
from holdfast.multihost import Solo, sync_global_processes

with CheckpointManager(root) as manager:
    manager.save(1, shards(1))
    manager.wait_until_finished()
with CheckpointManager(root, options=Options(read_only=True)) as manager:
    if index == 1:
        sync_global_processes("read", timeout=60)
        save(
            f"{root}/1",
            {"w": np.zeros((2, 1 << 10), np.float32)},
            step=1,
            overwrite=True,
            group=Solo(),
        )
    else:
        gather = manager._root.group.gather

        def late(*args, **options):
            sync_global_processes("read", timeout=60)
            manager._root.group.gather = gather
            return gather(*args, **options)

        manager._root.group.gather = late
    error = goes(lambda: manager.restore(1, shards(0)), StepGone)
    assert "overwritten" in str(error), error
    assert (
        float(manager.restore(1, shards(0), fallback=True)["w"].addressable_shards[0].data[0, 0])
        == 0
    )

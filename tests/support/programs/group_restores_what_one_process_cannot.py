"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

import sys

import numpy as np
from group_restores_start import damage, shards
from joined import index, root
from sharded_state import goes, state

from holdfast.checkpoint import CheckpointManager, Corrupt
from holdfast.multihost import sync_global_processes

read = sys.argv[5]
with CheckpointManager(root) as manager:
    for step in (1, 2):
        manager.save(step, shards(step) | {"r": state(step)["r"]})
    manager.wait_until_finished()
    if index == 0:
        damage(2, 1)
    sync_global_processes("damaged", timeout=30)
    like = shards(0) | {"r": state(0)["r"]}
    error = goes(lambda: manager.restore(2, like, read=read), Corrupt)
    assert error.process == 1 and "00001-00000" in error.file, (error, error.process, error.file)
    assert index == 1 or str(error).startswith("process 1: "), error
    got = manager.restore(1, like, read=read)
    assert np.array_equal(
        np.asarray(got["w"].addressable_shards[0].data),
        np.asarray(shards(1)["w"].addressable_shards[0].data),
    )
    error = goes(lambda: manager.restore(like=like, read=read), Corrupt)
    assert error.process == 1
    got = manager.restore(like=like, read=read, fallback=True)
    assert float(got["r"].addressable_shards[0].data[0]) == 1

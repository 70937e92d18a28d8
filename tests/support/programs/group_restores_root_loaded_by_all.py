"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

import os

import numpy as np
from group_restores_start import Counted, damage, shards
from joined import index, root
from sharded_state import goes

from holdfast.checkpoint import SAVED, CheckpointManager, Corrupt, StepNotFound, load, save
from holdfast.multihost import Solo, default_group, sync_global_processes


class SavingMeanwhile(Counted):
    # Once the primary's answer is known here, a newer step appears.
    def broadcast(self, *args, **options):
        answer = self.group.broadcast(*args, **options)
        if index == 1 and not os.path.exists(f"{root}/2"):
            save(f"{root}/2", {"w": np.zeros((2, 1 << 10), np.float32)}, step=2, group=Solo())
        return answer


with CheckpointManager(root) as manager:
    manager.save(1, shards(1))
got = load(root, shards(0), group=SavingMeanwhile(default_group()))
assert int(np.asarray(got["w"].addressable_shards[0].data)[0, 0]) == 1 + (index << 10)
for like in (shards(0), SAVED):
    error = goes(lambda: load(root, like), ValueError)
    assert "group=" in str(error) and root in str(error), error
for step in (1, 2):
    got = load(f"{root}/{step}", shards(0))
    assert int(np.asarray(got["w"].addressable_shards[0].data)[0, 0]) == (
        1 + (index << 10) if step == 1 else 0
    )
assert load(root)["w"].shape == (2, 1 << 10)  # numpy, alone: any step is a whole one

sync_global_processes("loaded", timeout=30)
if index == 0:
    damage(1, 1)
sync_global_processes("damaged", timeout=30)
error = goes(lambda: load(f"{root}/1", shards(0), group=default_group()), Corrupt)
assert error.process == 1, error
error = goes(lambda: load(f"{root}/none", shards(0), group=default_group()), StepNotFound)
assert "there is nothing at" in str(error), error

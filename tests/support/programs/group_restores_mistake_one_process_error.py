"""Runs in the processes of tests/system/test_group_restores.py."""

from __future__ import annotations

import numpy as np
from group_restores_start import shards
from joined import index, root
from sharded_state import goes

from holdfast.checkpoint import CheckpointError, CheckpointManager, TreeMismatch

given = []


class Refusing:
    def get_state(self):
        return {"at": 1}

    def set_state(self, state):
        given.append(state)
        if index == 2:
            raise RuntimeError("no such file in this shard")


with CheckpointManager(root) as manager:
    for step in (1, 2):
        manager.save(step, items={"state": shards(step), "data": Refusing()})
    manager.wait_until_finished()
    like = shards(0)
    wrong = {"w": like["w"], "v": like["w"]} if index == 1 else like
    for fallback in (False, True):
        error = goes(lambda: manager.restore(2, wrong, fallback=fallback), TreeMismatch)
        assert error.process == 1 and error.leaf == "v", (error.process, error.leaf)
        # Where one process fails no iterator gets its state, on any.
        both = {"data": Refusing(), "state": wrong}
        given.clear()
        error = goes(lambda: manager.restore(2, items=both, fallback=fallback), TreeMismatch)
        assert error.process == 1 and error.leaf == "v" and not given, (error.process, given)
        kind = RuntimeError if index == 2 else CheckpointError
        error = goes(lambda: manager.restore(2, Refusing(), item="data", fallback=fallback), kind)
        assert "no such file in this shard" in str(error) and (index == 2 or error.process == 2), (
            error
        )
    error = goes(lambda: manager.restore(1 if index == 1 else 2, like), CheckpointError)
    assert error.process == 1 and "step 1" in str(error) and "step 2" in str(error), error
    assert int(np.asarray(manager.restore(2, like)["w"].addressable_shards[0].data)[0, 0]) == 2 + (
        index << 10
    )

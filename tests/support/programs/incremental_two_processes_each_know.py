"""Runs in the processes of tests/checkpoint/saving/test_incremental.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from joined import index, root
from sharded_state import state

from holdfast.checkpoint import CheckpointManager, Corrupt, KeepLast, Options

with CheckpointManager(root, keep_policy=KeepLast(2), options=Options(incremental=True)) as manager:
    for step in range(5):
        base = state(1, 1 << 16)
        moving = state(step)
        if step == 3 and index == 1:
            manager._state.history.forget()
        manager.save(step, {"base": base["w"], "moving": moving["w"], "n": step})
        manager.wait_until_finished()
        linked = manager.statistics()["save_linked_bytes"]
        assert linked == (1 << 18) * (step if step < 3 or index == 0 else step - 1), (step, linked)
    for step in (3, 4):
        got = manager.restore(step, like={"base": base["w"], "moving": moving["w"], "n": 0})
        for name, want in (("base", base["w"]), ("moving", state(step)["w"])):
            for a, b in zip(got[name].addressable_shards, want.addressable_shards, strict=True):
                assert np.array_equal(np.asarray(a.data), np.asarray(b.data)), (step, name)
    # One process's file is damaged, and a restore says so on both: both write everything.
    if index == 1:
        for pack in Path(root, "4/state").glob("00001-*.safetensors"):
            pack.write_bytes(pack.read_bytes()[:-1] + b"?")
    with pytest.raises(Corrupt):
        manager.restore(4, like={"base": base["w"], "moving": moving["w"], "n": 0})
    manager.save(5, {"base": base["w"], "moving": moving["w"], "n": 5})
    manager.wait_until_finished()
    assert manager.statistics()["save_linked_bytes"] == linked, index
    manager.restore(5, like={"base": base["w"], "moving": moving["w"], "n": 0})

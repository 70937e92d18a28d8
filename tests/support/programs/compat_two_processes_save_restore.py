"""Runs in the processes of tests/system/test_compat.py."""

from __future__ import annotations

import os

import jax
import numpy as np
from joined import index, root
from sharded_state import same, state

from holdfast.compat import orbax as ocp
from holdfast.compat.orbax import v1

options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=1)
with ocp.CheckpointManager(root, options=options, item_names=("state", "meta")) as manager:
    for step in range(4):
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state(step)),
            meta=ocp.args.JsonSave({"step": step, index: "of each"}),
        )
        assert manager.save(step, args=items) == (step % 2 == 0)
    manager.wait_until_finished()
    assert list(manager.all_steps()) == [2], manager.all_steps()
    target = jax.tree.map(
        lambda leaf: ocp.utils.to_shape_dtype_struct(leaf) if hasattr(leaf, "shape") else leaf,
        state(0),
    )
    both = manager.restore(
        None,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()
        ),
    )
    assert same(both["state"], 2) and both["meta"] == {"step": 2, "0": "of each"}
    sharding = manager.item_metadata(2)["state"]["w"].sharding
    assert sharding.to_jax_sharding() == state(0)["w"].sharding
    ocp.multihost.sync_global_processes("done")
v1.save(root + "/v1", {"w": state(7)["w"]})
rows = v1.load(root + "/v1", {"w": state(0)["w"]})["w"].addressable_shards[0].data
assert np.array_equal(rows, state(7)["w"].addressable_shards[0].data)
assert v1.delete(root + "/v1") and not os.path.exists(root + "/v1")

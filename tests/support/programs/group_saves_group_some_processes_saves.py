"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import index, root

from holdfast.checkpoint import CheckpointManager
from holdfast.multihost import ClusterGroup, current_client, sync_global_processes

if index != 1:
    group = ClusterGroup(current_client(), [0, None, 1][index], 2, processes=[0, 2])
    assert list(group.processes) == [0, 2]
    pair = Mesh(np.array([device for device in jax.devices() if device.process_index != 1]), ("x",))
    whole = np.arange(8.0, dtype=np.float32)
    place = NamedSharding(pair, P("x"))
    made = jax.make_array_from_callback((8,), place, lambda where: whole[where])
    with CheckpointManager(root, group=group) as manager:
        manager.save(1, {"w": made})
        manager.wait_until_finished()
        got = manager.restore(1, {"w": made})["w"]
        for shard in got.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), whole[shard.index])
sync_global_processes("end", timeout=30)

"""Runs in the processes of tests/system/test_shared_restores.py: FSDP x DP, read once by peers."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import count, root

from holdfast.checkpoint import CheckpointManager
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import default_group

mesh = Mesh(np.array(jax.devices()).reshape(2, count // 2), ("data", "model"))
sharding = NamedSharding(mesh, P("model"))
counts = {"read": 0}
read = LocalStorage.read


def counting(self, name, offset, buffers):
    got = read(self, name, offset, buffers)
    counts["read"] += got
    return got


LocalStorage.read = counting


def whole(i: int) -> np.ndarray:
    return np.random.default_rng(i).standard_normal((1024, 1024)).astype(np.float32)


def like(i: int) -> jax.Array:
    return jax.make_array_from_callback((1024, 1024), sharding, lambda where: whole(i)[where])


state = {f"w{i}": like(i) for i in range(4)} | {"table": whole(9)}
size = 5 * whole(0).nbytes
with CheckpointManager(root) as manager:
    manager.save(1, state)
    manager.wait_until_finished()
    for how, most in (("each", 3.0), ("once", 1.1)):
        counts["read"] = 0
        found = manager.restore(1, state, read=how)
        for i in range(4):
            assert found[f"w{i}"].sharding == sharding
            for shard in found[f"w{i}"].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), whole(i)[shard.index])
        assert isinstance(found["table"], np.ndarray)
        assert np.array_equal(found["table"], whole(9))
        told = default_group().gather("bytes", str(counts["read"]).encode(), timeout_s=30)
        if told is not None:
            all_bytes = sum(map(int, told))
            print(how, all_bytes / size, flush=True)
            assert all_bytes <= most * size, (how, all_bytes, size)

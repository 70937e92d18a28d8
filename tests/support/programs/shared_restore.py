"""Runs in the processes of tests/system/test_shared_restores.py: FSDP x DP, read once by peers."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import count, index, root

from holdfast.checkpoint import CheckpointManager, Corrupt, Options
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import default_group
from holdfast.multihost.peers.peer_connection import PeerConnection

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


def own(rank: int) -> np.ndarray:
    return np.random.default_rng(100 + rank).integers(0, 256, 1 << 20, np.uint8)


def flip(self, name, offset, buffers, *limits):
    got = read_of_peer(self, name, offset, buffers, *limits)
    buffers[0][0] ^= 1
    return got


read_of_peer = PeerConnection.read
state = {f"w{i}": like(i) for i in range(4)} | {"table": whole(9), "own": own(index)}
size = 5 * whole(0).nbytes + count * own(0).nbytes
options = Options(per_process=lambda path: path == "own")
with CheckpointManager(root, options=options) as manager:
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
        assert np.array_equal(found["own"], own(index))
        told = default_group().gather("bytes", str(counts["read"]).encode(), timeout_s=30)
        if told is not None:
            all_bytes = sum(map(int, told))
            print(how, all_bytes / size, flush=True)
            assert all_bytes <= most * size, (how, all_bytes, size)

    # Rows of their own, in part, and another process's copy of what each keeps.
    rows = NamedSharding(mesh, P(("data", "model")))
    wanted = {
        f"w{i}": jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=rows) for i in (1, 3)
    }
    found = manager.restore(1, wanted | {"own": own(0)}, partial=True, read="once", process=2)
    for i in (1, 3):
        for shard in found[f"w{i}"].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), whole(i)[shard.index])
    assert np.array_equal(found["own"], own(2))

    # What a peer sends damaged comes from elsewhere.
    before = manager.statistics()["restore_peer_failures"]
    if index == 1:
        PeerConnection.read = flip
    found = manager.restore(1, {"table": whole(9)}, partial=True, read="once")
    PeerConnection.read = read_of_peer
    assert np.array_equal(found["table"], whole(9))
    damaged = manager.statistics()["restore_peer_failures"] - before
    assert (damaged > 0) == (index == 1), damaged

    # What the store has damaged is nowhere else.
    default_group().barrier("all restored", timeout_s=30)
    if index == 0:
        pack = max(Path(root).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    default_group().barrier("damaged", timeout_s=30)
    try:
        manager.restore(1, state, read="once")
    except Corrupt as error:
        print("Corrupt:", error.leaf, flush=True)
    else:
        raise AssertionError("a damaged chunk was restored")

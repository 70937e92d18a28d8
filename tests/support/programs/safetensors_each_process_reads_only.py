"""Runs in the processes of tests/system/test_safetensors.py."""

from __future__ import annotations

import sys

import jax
import numpy as np

from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.layouts.safetensors import SafetensorsCheckpoint
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage

index = int(sys.argv[1])
count = int(sys.argv[2])
path = sys.argv[3]
port = sys.argv[4]
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
mesh = jax.make_mesh((4,), ("d",))
read: list[int] = []
checkpoint = SafetensorsCheckpoint(StorePath(CountingStorage(open_storage(path), read.append)))
item = checkpoint.item("state")
specs = [jax.P("d"), jax.P(None, "d")]
like = {
    leaf.path: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, specs[i % 2])
    )
    for i, leaf in enumerate(item.leaves)
}
read.clear()  # what its headers took
back = restore_checkpoint(checkpoint, "state", like)
own = sum(leaf.nbytes for leaf in item.leaves) // count
assert sum(read) == own, (read, own)
plain = restore_checkpoint(open_checkpoint(path), "state")
for name, array in back.items():
    (shard,) = array.addressable_shards
    assert np.asarray(shard.data).tobytes() == plain[name][shard.index].tobytes(), name
print("own bytes", own)

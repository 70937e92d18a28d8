"""Runs in the processes of tests/system/test_ranged_reads.py."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import index, root
from sharded_state import mesh

from holdfast.checkpoint import Corrupt
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.restoring.reader import ItemReader
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage

counted = []
storage = CountingStorage(LocalStorage(root), counted.append)
record = read_record(LocalStorage(root), "")
checkpoint = HoldfastCheckpoint(storage, record=record)
rows = NamedSharding(mesh, P("x"))
like = {
    leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows)
    for leaf in record.items["state"].leaves
}
got = restore_checkpoint(checkpoint, like=like)
needed = sum(shard.data.nbytes for array in got.values() for shard in array.addressable_shards)
for path, array in got.items():
    mine = array.addressable_shards[0].index[0]
    found = np.asarray(array.addressable_shards[0].data)
    values = np.arange(mine.start, mine.stop)
    assert (found == (values % 251)[:, None].astype(found.dtype)).all(), path
ratio = sum(counted) / needed
print(f"{ratio:.4f} of {needed:,} bytes", flush=True)
assert 1 <= ratio <= 1.05, ratio

from holdfast.multihost import default_group

group = default_group()
group.barrier("all have read it", timeout_s=60)
if index == 0:
    item = record.items["state"]
    file = item.leaves[0].files[0]
    entry = ItemReader(storage, "", item).load_headers([file])[file]["w"]
    with open(f"{root}/{item.files[file].name}", "r+b") as pack:
        pack.seek(entry.start + entry.nbytes * 11 // 16)  # in the middle of the rows of process 5
        byte = pack.read(1)[0]
        pack.seek(-1, 1)
        pack.write(bytes([byte ^ 1]))
group.barrier("one byte is another", timeout_s=60)
try:
    restore_checkpoint(checkpoint, like=like)
except Corrupt as error:
    assert index == 5 and error.leaf == "w", error
else:
    assert index != 5
group.barrier("the end", timeout_s=60)

"""Bytes read follow bytes needed: processes that each need some rows of the same large chunks read
these, checked, and little more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.checkpoint import save
from tests.support.checkpointing import run_together

SCRIPT = """
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.restoring.reader import ItemReader
from holdfast.checkpoint.restoring.restore import restore_item
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage

counted = []
storage = CountingStorage(LocalStorage(root), counted.append)
record = read_record(LocalStorage(root), "")
rows = NamedSharding(mesh, P("x"))
like = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows) for leaf in record.items["state"].leaves}
got = restore_item(storage, "", record, "state", like)
needed = sum(shard.data.nbytes for array in got.values() for shard in array.addressable_shards)
for path, array in got.items():
    mine = array.addressable_shards[0].index[0]
    found, values = np.asarray(array.addressable_shards[0].data), np.arange(mine.start, mine.stop)
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
    restore_item(storage, "", record, "state", like)
except Corrupt as error:
    assert index == 5 and error.leaf == "w", error
else:
    assert index != 5
group.barrier("the end", timeout_s=60)
"""


def test_eight_processes_read_an_eighth_each(tmp_path: Path) -> None:
    """Of two chunks of 58 MB, no multiple of a block, each of 8 processes reads at most 1.05 of its
    eighth, headers and all; and a flipped byte is Corrupt for the process that needs it, and for no
    other.
    """
    column = (np.arange(232) % 251)[:, None]
    tree = {
        "w": np.broadcast_to(column, (232, 62_501)).astype(np.float32),
        "z": np.broadcast_to(column, (232, 125_002)).astype(np.uint16),
    }
    assert all(array.nbytes == 58_000_928 for array in tree.values())
    save(tmp_path, tree)
    run_together(SCRIPT, 8, tmp_path)

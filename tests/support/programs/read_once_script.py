"""Runs in the processes of tests/system/test_read_once.py."""

from __future__ import annotations

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import count, index, root
from sharded_state import mesh

import holdfast.checkpoint.restoring.reader as reader
import holdfast.multihost
from holdfast.checkpoint import save
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.restoring.restore import RestoreOptions, restore_item
from holdfast.checkpoint.storage.local import LocalStorage


class Counting(LocalStorage):
    # Counts the bytes of chunks that are read: what lies behind the header of a pack.
    bytes = 0
    lock = threading.Lock()

    def read(self, name, offset, buffers):
        found = super().read(name, offset, buffers)
        heads = {file.name: file.head for item in record.items.values() for file in item.files}
        with self.lock:
            if found > 1:  # one byte is the look at where a file ends
                self.bytes += max(0, offset + found - max(offset, heads[name]))
        return found


def make(shape, dtype, spec):
    # Half of the bits, so that every process has to have read the right ones.
    whole = np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(dtype)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda i: whole[i])


shapes = [(8 << 20,), (5 << 18, 3), (1 << 12,), (3,), (), (7, 5), (4, 1 << 18), (0, 3)]
dtypes = [
    jnp.float32,
    jnp.bfloat16,
    np.int32,
    np.uint8,
    np.float32,
    np.bool_,
    jnp.float8_e5m2,
    np.float32,
]
tree = {
    f"r{i}": make(shape, dtype, P())
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
}
explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)
first = mesh.axis_names[0]
for name, spec in {"all": P(), "reduced": P(reduced={first})}.items():
    for size in (64, 8 << 20):
        tree[f"{name} {size}"] = jax.make_array_from_callback(
            (size,), NamedSharding(explicit, spec), np.arange(size, dtype=np.int32).__getitem__
        )
tree["many"] = [make((16 + i,), np.float32, P()) for i in range(50)]
folder = f"{root}/{sys.argv[5]}"
save(folder, tree)


def dist(like):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)


if sys.argv[5] == "exact":
    reader.GAP_BYTES = (
        0  # small chunks that lie close together are read in one go, with what lies between them
    )
gaps = 0 if sys.argv[5] == "exact" else 1 << 16
storage = Counting(folder)
record = read_record(storage, "")
got = restore_item(
    storage, "", record, "state", like=dist(tree), options=RestoreOptions(read="once")
)
for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(tree), strict=True
):
    assert a.sharding == b.sharding and a.dtype == b.dtype
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes(), path
group = holdfast.multihost.default_group()
counts = group.gather("counts", str(storage.bytes).encode(), timeout_s=30)
total = sum(leaf.nbytes for leaf in record.items["state"].leaves)
if index == 0:
    counts = list(map(int, counts))
    print(counts, total)
    assert total <= sum(counts) <= total + gaps, (counts, total)
    assert max(counts) < 1.3 * total / count, (counts, total)
plain = Counting(folder)
restore_item(plain, "", record, "state", like=dist(tree))
assert total <= plain.bytes <= total + gaps, (plain.bytes, total)

"""Runs in the processes of tests/system/test_orbax_names.py."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

index = int(sys.argv[1])
count = int(sys.argv[2])
port = sys.argv[3]
order = sys.argv[4]
jax.distributed.initialize(
    f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}"
)
if order == "ours first":
    import holdfast.multihost as ours
from orbax.checkpoint._src.multihost import multihost as theirs
from orbax.checkpoint._src.multihost import multislice

import holdfast.multihost as ours


def outcome(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except ValueError:
        return ValueError


def same(name, *arguments, theirs_in=theirs, **options):
    a = outcome(getattr(ours, name), *arguments, **options)
    b = outcome(getattr(theirs_in, name), *arguments, **options)
    equal = jax.tree.map(
        lambda x, y: np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype, a, b
    )
    assert jax.tree.all(equal), (name, arguments, options, a, b)
    return a


# Before the maps are known.
for name in ("runtime_to_distributed_ids", "distributed_to_device_ids"):
    assert same(name) is ValueError
assert same("runtime_to_distributed_process_id", 0) is ValueError
assert same("is_runtime_to_distributed_ids_initialized") is False
assert same("is_distributed_to_device_ids_initialized") is False
for module in (ours, theirs):
    module.initialize_runtime_to_distributed_ids()
    module.initialize_distributed_to_device_ids()
    module.initialize_distributed_to_device_ids()
assert same("runtime_to_distributed_ids") == [0, 1, 2, 3]
same("distributed_to_device_ids")
assert same("is_runtime_to_distributed_ids_initialized") and same(
    "is_distributed_to_device_ids_initialized"
)
for process in range(count):
    same("runtime_to_distributed_process_id", process)

# Who we are.
assert (
    same("process_index") == index
    and same("process_count") == count
    and same("coordination_timeout") == 300
)
for primary in (None, 0, 1, 7):
    same("is_primary_host", primary)
assert same("use_experimental_distributed_process_id") is False
assert same("is_jax_distributed_client_initialized") is True
assert ours.get_jax_distributed_client() is theirs.get_jax_distributed_client()
for name in ("is_native_pathways_backend", "is_proxy_pathways_backend"):
    assert same(name) is False
for name in (
    "is_pathways_backend",
    "is_pathways_controller",
    "is_pathways_colocated_runtime_active",
):
    assert same(name) is False
for module in (ours, theirs):
    module.mark_pathways_colocated_runtime_active()
assert same("is_pathways_colocated_runtime_active") is True
for device in jax.devices():
    same("process_index_from_device", device)
devices = np.array(jax.devices())
assert same("unique_processes_from_devices", devices) == {0, 1, 2, 3}
same("unique_processes_from_devices", devices.reshape(2, -1)[0])

# Barriers.
for processes in (None, {index}, {0, 1}, {0, 1, 2, 3}, set(), {7}):
    same("should_skip_process_sync", processes)
same("unique_barrier_key", "k")
same("unique_barrier_key", "k", prefix="p")
same("unique_barrier_key", "k", prefix="p", suffix="s")
others = set(range(count)) - {index}
assert same("get_barrier_sync_fn", processes=others) is ValueError
for number, processes in enumerate(
    (None, {0, 1, 2, 3}, {0, 1} if index < 2 else {2, 3}, {index}, set())
):
    name = f"{number}.{sorted(processes or [])}"  # Orbax: one name, one set of processes
    same("sync_global_processes", name, timeout=30, processes=processes)
    for module in (ours, theirs):
        assert (
            module.get_barrier_sync_fn(processes=processes)(key=name + "f", timeout_ms=30000)
            is None
        )
calls = []


def fn(*, key, timeout_ms):
    calls.append((key, timeout_ms))


same("sync_global_processes", "own", timeout=7, processes={0, 1, 2, 3}, barrier_sync_fn=fn)
assert calls == [("own", 7000)] * 2
durations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **kw: durations.append(event)
)
same("sync_global_processes", "timed")
same("sync_global_processes", "timed", record_event_name="/mine", processes={0, 1, 2, 3})
usual = "/jax/checkpoint/sync_global_devices_duration_sec"
assert [event for event in durations if event in (usual, "/mine")] == [usual] * 2 + ["/mine"] * 2
assert same("reached_preemption", 3) is False

# Collectives.
assert same("global_max", [index, -index, 5, 2**31 - 1, -(2**31)]) == [3, 0, 5, 2**31 - 1, -(2**31)]
same("global_max", [index * 7 % 3])
tree = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3) * (index + 1),
    "b": [jnp.int32(index), np.float16(index), True, index % 2 == 0],
    "c": jnp.ones((3,), jnp.bfloat16) * index,
    "d": (np.uint8([index, 255 - index]), None),
    "e": np.zeros((0, 4), np.float32),
}
same("broadcast_one_to_all", tree)
same("broadcast_one_to_all", tree, is_source=index == 2)

# Slices.
for shape, axis in (((4, 2), 0), ((2, 4), 0), ((4, 2), 1), ((8,), 0), ((2, 2, 2), 1)):
    mesh = jax.sharding.Mesh(devices.reshape(shape), ["x", "y", "z"][: len(shape)])
    replicas = same("replica_count", mesh, theirs_in=multislice, replica_axis_index=axis)
    same("local_replica_devices", mesh, theirs_in=multislice, replica_axis_index=axis)
    for process in (*range(count), 9):
        same("process_replica_id", process, mesh, theirs_in=multislice, replica_axis_index=axis)
    for replica in range(replicas):
        same(
            "replica_devices",
            mesh,
            theirs_in=multislice,
            replica_id=replica,
            replica_axis_index=axis,
        )
        same(
            "primary_process_in_replica",
            mesh,
            theirs_in=multislice,
            replica_id=replica,
            replica_axis_index=axis,
        )
        for process in range(count):
            same(
                "in_replica",
                process,
                mesh,
                theirs_in=multislice,
                replica_id=replica,
                replica_axis_index=axis,
            )
same("slice_count", theirs_in=multislice)

# Memory of devices, and one replica to all.
same("get_device_memory", theirs_in=multislice)
mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("replica", "data"))
source = jax.sharding.NamedSharding(
    jax.sharding.Mesh(mesh.devices[0], ("data",)), jax.sharding.PartitionSpec("data")
)
is_source = ours.in_replica(index, mesh)


def leaves():
    values = [np.arange(8, dtype=np.float32), np.arange(16, dtype=np.int32).reshape(8, 2)]
    abstract = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=source) for value in values]
    return (
        tuple(jax.device_put(value, source) for value in values) if is_source else tuple(abstract)
    )


for name in ("get_available_memory", "tree_memory_per_device"):
    same(name, leaves(), *([0.5] if name == "get_available_memory" else []), theirs_in=multislice)
same("get_leaf_memory_per_device", leaves()[1], theirs_in=multislice)
one, two = (
    module.broadcast_one_replica_to_all(leaves(), mesh, 0, is_source, memory_limit_bytes=20)
    for module in (ours, multislice)
)
assert one[1] == two[1] == 2
for mine, other in zip(one[0], two[0], strict=True):
    assert mine.sharding == other.sharding and mine.dtype == other.dtype
    assert all(
        np.array_equal(a.data, b.data)
        for a, b in zip(mine.addressable_shards, other.addressable_shards, strict=True)
    )

# The flag by which Orbax counts by distributed ids, registered by Orbax and read by us.
from absl import flags

assert same("use_experimental_distributed_process_id") is False
flags.FLAGS(["x", "--experimental_orbax_use_distributed_process_id"])
assert same("use_experimental_distributed_process_id") is True
assert same("process_index") == index
for device in jax.devices():
    same("process_index_from_device", device)
print("all the same")

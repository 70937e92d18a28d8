"""One replica's arrays to all others: bits, rounds, memory, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import holdfast.multihost as multihost
from tests.support.cluster import free_port, run_processes

MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
import holdfast.multihost as multihost
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
index, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if count > 1:
    multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "data"))
replica = Mesh(mesh.devices[1], ("data",))  # the source is the second
is_source = multihost.in_replica(index, mesh, replica_id=1)
def leaf(value, spec):
    sharding = NamedSharding(replica, spec)
    return jax.device_put(value, sharding) if is_source else jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
values = [
    np.array([-0.0, np.nan, 1.5, -np.inf], np.float32), np.arange(8, dtype=np.int8).reshape(4, 2) - 4, np.array([True, False]),
    np.array([1 - 2j, 3j], np.complex64), np.asarray(jnp.array([1.5, -0.0], jnp.bfloat16)), np.uint32(7),
]
specs = [P("data"), P(None, "data"), P("data"), P(), P("data"), P()]
"""


@pytest.mark.parametrize("count", [1, 2])
def test_all_replicas_get_the_bits_of_one(count: int) -> None:
    """Floats with their signs and NaNs, small integers, booleans, complex numbers: with their
    dtypes, over all devices of the mesh.
    """
    script = (
        MESH
        + """
leaves = tuple(leaf(value, spec) for value, spec in zip(values, specs))
found, rounds = multihost.broadcast_one_replica_to_all(leaves, mesh, 0, is_source)
assert rounds == 1 and all(each.is_deleted() for each in leaves if is_source)
for value, spec, array in zip(values, specs, found):
    assert array.dtype == value.dtype and array.sharding == NamedSharding(mesh, spec), (array.dtype, array.sharding)
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(value[shard.index]).tobytes(), (value, shard)
tight = tuple(leaf(value, spec) for value, spec in zip(values, specs))
found, rounds = multihost.broadcast_one_replica_to_all(tight, mesh, 0, is_source, memory_limit_bytes=9)
assert (len(found), rounds) == (6, 4), rounds  # of 8, 4 + 1, 16 and 2 + 4 bytes a device
multihost.shutdown()
"""
    )
    run_processes(script, count, devices=4 // count, arguments=[free_port()])


def test_the_memory_of_a_device() -> None:
    """A tree takes the bytes of its shards; a round may take a share of a third of what is left;
    shares are above 0, up to 1.
    """
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {
        "a": jax.ShapeDtypeStruct((3, 4), np.float32, sharding=sharding),
        "b": jax.ShapeDtypeStruct((5,), np.int8, sharding=sharding),
    }
    assert (
        multihost.get_leaf_memory_per_device(tree["a"]) == 48
        and multihost.tree_memory_per_device(tree) == 53
    )
    assert multihost.get_available_memory(tree, 0.5) == int(
        (multihost.get_device_memory() - 53) / 6
    )
    for factor in (0, 1.5):
        with pytest.raises(
            ValueError, match=f"scaling_factor={factor}: expected more than 0 and at most 1"
        ):
            multihost.get_available_memory(tree, factor)


def test_a_leaf_that_knows_of_the_replicas_is_refused() -> None:
    """Its sharding has to be over the axes of one replica."""
    script = (
        MESH
        + """
for sharding in (NamedSharding(mesh, P("replica")), jax.sharding.SingleDeviceSharding(jax.devices()[0])):
    try:
        multihost.broadcast_one_replica_to_all((jax.device_put(np.ones(4), sharding),), mesh, 0, True)
        raise SystemExit("not refused")
    except ValueError as error:
        assert "expected a NamedSharding over the axes of a replica, without 'replica'" in str(error)
"""
    )
    run_processes(script, 1, devices=4, arguments=[0])

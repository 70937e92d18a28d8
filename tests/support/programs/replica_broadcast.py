"""Two replicas, of which the second is the source. argv: index, count, port, case."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from holdfast import multihost

P: Any = jax.sharding.PartitionSpec  # jax does not type these two
Abstract: Any = jax.ShapeDtypeStruct
index, count = map(int, sys.argv[1:3])
if count > 1:
    multihost.initialize(f"127.0.0.1:{sys.argv[3]}", count, index, timeout_s=60)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "data"))
source = Mesh(mesh.devices[1], ("data",))
is_source = multihost.in_replica(index, mesh, replica_id=1)

VALUES: list[tuple[Any, Any]] = [
    (np.array([-0.0, np.nan, 1.5, -np.inf], np.float32), P("data")),
    (np.arange(8, dtype=np.int8).reshape(4, 2) - 4, P(None, "data")),
    (np.array([True, False]), P("data")),
    (np.array([1 - 2j, 3j], np.complex64), P()),
    (np.asarray(jnp.array([1.5, -0.0], jnp.bfloat16)), P("data")),
    (np.uint32(7), P()),
]


def leaf(value: Any, spec: Any) -> Any:
    sharding = NamedSharding(source, spec)
    if is_source:
        return jax.device_put(value, sharding)
    return Abstract(value.shape, value.dtype, sharding=sharding)


def spread() -> None:
    """All replicas get the bits of one, in one round or in several."""
    leaves = tuple(leaf(value, spec) for value, spec in VALUES)
    arrays, rounds = multihost.broadcast_one_replica_to_all(leaves, mesh, 0, is_source)
    assert rounds == 1
    assert not is_source or all(each.is_deleted() for each in leaves)
    for (value, spec), array in zip(VALUES, arrays, strict=True):
        assert array.dtype == value.dtype, (array.dtype, value)
        assert array.sharding == NamedSharding(mesh, spec), (array.sharding, value)
        for shard in array.addressable_shards:
            expected = np.ascontiguousarray(value[shard.index])
            assert np.asarray(shard.data).tobytes() == expected.tobytes(), (value, shard)
    tight = tuple(leaf(value, spec) for value, spec in VALUES)
    arrays, rounds = multihost.broadcast_one_replica_to_all(
        tight, mesh, 0, is_source, memory_limit_bytes=9
    )
    assert (len(arrays), rounds) == (6, 4), rounds  # of 8, 4 + 1, 16 and 2 + 4 bytes a device
    multihost.shutdown()


def refused() -> None:
    """A leaf whose sharding is not over the axes of a replica."""
    for sharding in (NamedSharding(mesh, P("replica")), SingleDeviceSharding(jax.devices()[0])):
        array = jax.device_put(np.ones(4), sharding)
        expected = "expected a NamedSharding over the axes of a replica, without 'replica'"
        with pytest.raises(ValueError, match=expected):
            multihost.broadcast_one_replica_to_all((array,), mesh, 0, True)


{"spread": spread, "refused": refused}[sys.argv[4]]()

"""One replica's arrays to all others: bits, rounds, memory, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import holdfast.multihost as multihost
from tests.support.cluster import free_port, run_processes
from tests.support.paths import program

PROGRAM = program("replica_broadcast")


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_replicas_get_the_bits_of_one(count: int) -> None:
    """Floats with their signs and NaNs, small integers, booleans, complex numbers: with their
    dtypes, over all devices of the mesh.
    """
    run_processes(PROGRAM, count, devices=4 // count, arguments=[free_port(), "spread"])


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


def test_a_leaf_over_the_replicas_is_refused() -> None:
    """Its sharding has to be over the axes of one replica."""
    run_processes(PROGRAM, 1, devices=4, arguments=[0, "refused"])

"""Runs in the processes of tests/system/test_host_values.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from host_values_start import OPTIONS, check_mine, mine
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import index, root
from sharded_state import goes, mesh, same, state

from holdfast.checkpoint import CheckpointManager, Options, TreeMismatch, UnsupportedLeaf, load

with CheckpointManager(root, options=OPTIONS) as manager:
    for step in (1, 2):
        manager.save(step, state(step) | mine(10 * step + index))
    manager.wait_until_finished()
    got = manager.restore(2, state(2) | mine(0))
    assert (
        same(got, 2) and check_mine(got, 20 + index) and isinstance(got["reader"]["on"], jax.Array)
    )
    assert check_mine(manager.restore(1), 10 + index)
    assert check_mine(manager.restore(2, state(2) | mine(0), process=1 - index), 21 - index)
    assert check_mine(load(f"{root}/2", types=[]), 20 + index)
    once = manager.restore(2, state(2) | mine(0), read="once")
    assert same(once, 2) and check_mine(once, 20 + index)
    spread = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P()))
    error = goes(lambda: manager.restore(2, {"reader": {"on": spread}}, partial=True), TreeMismatch)
    assert error.leaf == "reader.on" and "each keeps its own" in str(error), error
with CheckpointManager(
    f"{root}-all", options=Options(per_process=lambda path: path == "w")
) as manager:
    error = goes(lambda: manager.save(1, state(1)), UnsupportedLeaf)
    assert error.leaf == "w" and "leave it out of per_process" in str(error)

"""Runs in the processes of tests/system/test_host_values.py."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import index, root
from sharded_state import goes, same, state

from holdfast.checkpoint import CheckpointManager, SaveFailed, save


def refused(tree, leaf, says):
    # Both ways to save refuse it, on both processes, and the next save goes well.
    for call in (
        lambda: save(f"{root}/once", tree),
        lambda: (manager.save(7, tree), manager.wait_until_finished()),
    ):
        error = goes(call, SaveFailed)
        assert error.leaf == leaf and error.process == 1, (error.leaf, error.process)
        assert says in str(error), error
    assert manager.all_steps() == []


both = state(1)
LOCAL = "(numpy, a value of each host)"
with CheckpointManager(f"{root}/many") as manager:
    refused(
        both | {"n": np.zeros(3 + index)},
        "n",
        f"The leaf 'n' is float64[3] {LOCAL} on process 0 and float64[4] {LOCAL} on process 1",
    )
    refused(
        both | {"n": np.zeros(3, [np.float32, np.int8][index])},
        "n",
        f"float32[3] {LOCAL} on process 0 and int8[3] {LOCAL}",
    )
    refused(
        both | ({"extra": 1} if index else {}),
        "extra",
        "The leaf 'extra' is on process 1 and not on process 0",
    )
    says = (
        "float32[2, 1024] (array, (x) on x=2) on process 0 and float32[1024] (array, replicated on"
        " x=2) on process 1"
    )
    refused(both | {"r": both["r"] if index else both["w"]}, "r", says)
    zero = np.zeros(4, np.float32)
    first = NamedSharding(Mesh(jax.devices()[:1], "x"), P())
    one = jax.make_array_from_callback((4,), first, lambda i: zero, dtype=zero.dtype)
    refused(
        both | {"n": one},
        "n",
        "a value of each host) on process 0 and float32[4] (array, replicated on x=1) on process 1",
    )
    refused(both | {"n": [both["n"]] if index else (both["n"],)}, "", "planned another save")
    refused(
        both | {"n": np.arange(3) + index},
        "n",
        "'n' is local to each process and differs on processes [1] from process 0",
    )
    refused(both | {"name": f"net{index}"}, "name", "keep it per process: Options(per_process=...)")
    manager.save(7, both)
    manager.wait_until_finished()
    assert same(manager.restore(7, both), 1)

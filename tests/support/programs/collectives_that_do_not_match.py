"""Runs in the processes of tests/system/test_collectives.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from collectives_start import count, index
from jax.sharding import Mesh, NamedSharding

from holdfast import multihost
from holdfast.coordination import BarrierTimeout

P: Any = jax.sharding.PartitionSpec  # jax does not type it
last = count - 1


def odd(usual: Any, other: Any) -> Any:
    """Returns the last process's own of two values."""
    return other if index == last else usual


def broadcast(usual: Any, other: Any) -> Callable[[], Any]:
    return lambda: multihost.broadcast_one_to_all(odd(usual, other))


def replicas(value: Any, memory_limit_bytes: int, is_source: bool) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(count, 1), ("replica", "data"))
    own = NamedSharding(Mesh(mesh.devices[index], ("data",)), P())
    leaves = tuple(jax.device_put(each, own) for each in value)
    return multihost.broadcast_one_replica_to_all(leaves, mesh, 0, is_source, memory_limit_bytes)


floats = np.zeros(4, np.float32)
CASES: dict[str, Callable[[], Any]] = {
    "has int32[4] at ['a'], process 0 has float32[4] at ['a']": broadcast(
        {"a": floats}, {"a": np.zeros(4, np.int32)}
    ),
    "has float32[2, 2] at ['a'], process 0 has float32[4] at": broadcast(
        {"a": floats}, {"a": floats.reshape(2, 2)}
    ),
    "has float32[4] at ['b'], process 0 has float32[4] at ['a']": broadcast(
        {"a": floats}, {"b": floats}
    ),
    "has nothing more, process 0 has float32[4] at ['b']": broadcast(
        {"a": floats, "b": floats}, {"a": floats}
    ),
    "has nothing more, process 0 has float32[4] at ['a']": broadcast({"a": floats}, {}),
    "has uint32[2, 2] at the root, process 0 has keys of fry": broadcast(
        jax.random.split(jax.random.key(0), 2), np.zeros((2, 2), np.uint32)
    ),
    "expected one source, found process 0, process 2": lambda: multihost.broadcast_one_to_all(
        floats, is_source=index != 1
    ),
    "expected one source, found none": lambda: multihost.broadcast_one_to_all(
        floats, is_source=False
    ),
    "global_max: process 2 and process 0 do not call it alike: process 2 has 3 integers, process 0"
    " has 2 integers": lambda: multihost.global_max(odd([1, 2], [1, 2, 3])),
    "process 2 has 0 integers": lambda: multihost.global_max(odd([1], [])),
    "2147483648": lambda: multihost.global_max(odd([1], [2**31])),
    "has broadcast_one_to_all, process 0 has global_max": lambda: (
        multihost.broadcast_one_to_all(floats) if index == last else multihost.global_max([1])
    ),
    "has float32[4] as ": lambda: replicas([odd(np.zeros(4, np.int32), floats)], 1000, index == 0),
    "has leaves in rounds of [1, 1]": lambda: replicas([floats, floats], odd(1000, 1), index == 0),
    "broadcast_one_replica_to_all: expected one source, found replica 0, replica 2": lambda: (
        replicas([floats], 1000, index != 1)
    ),
}
for expected, call in CASES.items():
    began_s = time.monotonic()
    with pytest.raises(ValueError) as failed:
        call()
    assert expected in str(failed.value).replace("threefry2x32[2, 2]", "fry"), (
        expected,
        failed.value,
    )
    assert time.monotonic() - began_s < 20, expected
wrong = odd(floats, "text")
with pytest.raises(TypeError if index == last else ValueError, match="expected an array of numb"):
    multihost.broadcast_one_to_all(wrong)
with pytest.raises(TypeError if index == last else ValueError, match=r"of 0\.7: expected integers"):
    multihost.global_max(odd([1], [0.7]))
assert multihost.global_max([index]) == [last]
assert multihost.broadcast_one_to_all(np.int64(2**40 + index)) == 2**40
if index:
    began_s = time.monotonic()
    with pytest.raises(BarrierTimeout, match="process 0 did not call it, or hangs") as late:
        multihost.global_max([index], timeout_s=2)
    assert late.value.missing == (0,) and 1.9 < time.monotonic() - began_s < 4
print("all raised", flush=True)
multihost.sync_global_processes("end")
os._exit(0)  # nobody waits for process 0

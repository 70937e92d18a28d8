"""Runs in a process of four devices for tests/checkpoint/saving/test_replicas.py: replicas on the
devices of one process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import sys

import jax
import joined
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from holdfast.checkpoint import CheckpointManager, Options, ReplicasDiffer
from holdfast.checkpoint.saving import replicas

if sys.argv[5] == "program":
    # As on devices with memory of their own.
    replicas._is_host = lambda devices: False
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
value = np.array([np.nan, -0.0, 1, 2], np.float32)
other = value.copy()
other.view(np.uint32)[3] ^= 1 << 20
log = io.StringIO()
logging.getLogger("holdfast").addHandler(logging.StreamHandler(log))


def put(values: list[np.ndarray], spec: P) -> jax.Array:
    """Returns an array whose device number n has `values[n]`."""
    sharding = NamedSharding(mesh, spec)
    shape = (4,) if spec == P() else (8,)
    devices = mesh.devices.ravel()
    parts = [jax.device_put(data, device) for data, device in zip(values, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


good = {"whole": put([value] * 4, P()), "cut": put([value, value, other, other], P("a"))}
drifted = good | {"whole": put([value, value, other, value], P())}
with CheckpointManager(f"{joined.root}/warned") as manager:
    manager.save(1, good).wait()
    assert "drifted" not in log.getvalue()
    manager.save(2, drifted).wait()
    device = mesh.devices.ravel()[2]
    assert "'whole': process 0 (host " in log.getvalue() and f", {device})" in log.getvalue()
    manager.save(3, good | {"cut": put([value, value, other, value], P("a"))}).wait()
    assert "'cut': process 0" in log.getvalue()
    assert "differ from each other" in log.getvalue()
    assert manager.statistics()["replicas_differed"] == 2
    assert manager.all_steps() == [1, 2, 3]
    # A cast drops the bit that differs; it is looked for before that.
    last_bit = value.copy()
    last_bit.view(np.uint32)[3] ^= 1
    log.truncate(0)
    rounded = good | {"whole": put([value, last_bit, value, value], P())}
    manager.save(4, rounded, dtype=jax.numpy.bfloat16).wait()
    assert "'whole': process 0" in log.getvalue()

# A share of many leaves at each save, and a part of a large one: found in each sixteen saves.
rng = np.random.default_rng(1)
many = {f"leaf{number:03d}": put([value] * 4, P()) for number in range(200)}
large = rng.standard_normal(1 << 19).astype(np.float32)
other_large = large.copy()
other_large.view(np.uint32)[-1] ^= 1
whole = NamedSharding(mesh, P())


def put_large(last: np.ndarray) -> jax.Array:
    parts = [
        jax.device_put(data, device)
        for data, device in zip([large, large, large, last], mesh.devices.ravel(), strict=True)
    ]
    return jax.make_array_from_single_device_arrays(large.shape, whole, parts)


steps = itertools.count(16, 16)
with CheckpointManager(f"{joined.root}/many") as manager:

    def found_in_16_saves(state: dict[str, jax.Array], leaf: str) -> int:
        """Returns in how many saves a leaf was named, and checks that nothing else was."""
        log.truncate(0)
        before = manager.statistics()["replicas_differed"]
        for _ in range(16):
            manager.save(next(steps), state).wait()
        named = manager.statistics()["replicas_differed"] - before
        assert log.getvalue().count(f"{leaf!r}: process 0") == named, log.getvalue()
        return named

    by_program = sys.argv[5] == "program"
    good_many = many | {"large": put_large(large)}
    assert found_in_16_saves(good_many, "large") == 0
    drifted_many = good_many | {"leaf123": put([value, value, other, value], P())}
    assert found_in_16_saves(drifted_many, "leaf123") == 1
    # A device sums a large leaf in no time, the host's cores a part of it.
    drifted_large = good_many | {"large": put_large(other_large)}
    assert found_in_16_saves(drifted_large, "large") == (16 if by_program else 1)
all_compared = Options(on_replicas_differ="raise")
with CheckpointManager(f"{joined.root}/all", options=all_compared) as manager:
    for number, leaf in enumerate(("leaf003", "leaf123", "leaf199")):
        state = many | {leaf: put([value, value, other, value], P())}
        with contextlib.suppress(ReplicasDiffer):
            manager.save(number, state).wait()
            raise SystemExit(f"no ReplicasDiffer for {leaf}")

options = Options(on_replicas_differ="raise", may_differ=lambda path: path == "cut")
with CheckpointManager(f"{joined.root}/refused", options=options) as manager:
    handle = manager.save(1, drifted)
    try:
        handle.wait()
    except ReplicasDiffer as error:
        assert (error.leaf, error.process, error.step) == ("whole", 0, 1), vars(error)
    else:
        raise SystemExit("no ReplicasDiffer")
    with contextlib.suppress(ReplicasDiffer):
        manager.check_for_errors()
    manager.save(2, good | {"cut": put([value, value, other, value], P("a"))}).wait()
    assert manager.all_steps() == [2]

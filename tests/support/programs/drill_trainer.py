"""A trainer that meets the fault that is written into a file: argv[1] is the folder."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from holdfast import multihost

folder = Path(sys.argv[1])
index = int(os.environ.get("HOLDFAST_PROCESS_ID", sys.argv[2] if len(sys.argv) > 2 else 0))
if len(sys.argv) > 3:
    multihost.initialize(sys.argv[3], int(sys.argv[4]), index)
else:
    multihost.initialize()
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.checkpoint import CheckpointManager


def fault():
    try:
        return (folder / "fault").read_text() if index == 2 else ""
    except FileNotFoundError:
        return ""


def load_batch():
    time.sleep(0.3 if fault() == "slow" else 0.1)  # SLOW
    if fault() == "loader":
        time.sleep(3600)  # LOADER
    if fault() == "loop":
        spin()
    if fault() == "gil":
        ctypes.PyDLL(None).sleep(3600)  # GIL


def spin():
    count = 0
    while True:  # LOOP
        count += 1


def compiled():
    """Returns a function that sums over all processes, and waits for that, inside C++ alone."""
    mesh = jax.make_mesh((jax.device_count(),), ("processes",))
    shares = NamedSharding(mesh, PartitionSpec("processes"))
    values = jax.make_array_from_process_local_data(shares, np.ones(8))
    add = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    add(values).block_until_ready()
    return lambda: add(values).block_until_ready()  # COMPILED


def all_reduce():
    if add_compiled is not None:
        return add_compiled()
    return float(multihost_utils.process_allgather(jnp.ones(8)).sum())  # REDUCE


def train():
    manager = CheckpointManager(folder / "root") if (folder / "root").exists() else None
    step = 0
    while True:
        step += 1
        multihost.reached_preemption(step)
        load_batch()
        if fault() != "skip":
            all_reduce()
        if fault() == "ahead":
            step += 1
        multihost.sync_global_processes(f"step {step}")  # BARRIER
        if manager is not None and step % 5 == 0:
            try:
                manager.save(step, {"weights": jnp.ones(100_000)})
                manager.wait_until_finished()
            except Exception as error:
                print("not saved:", error, flush=True)


add_compiled = compiled() if "DRILL_COMPILED" in os.environ else None
train()

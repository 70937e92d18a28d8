"""Runs in the processes of tests/system/test_host_memory.py: saves and restores in a cgroup whose
limit is what the job uses with its state, and `share` times its state more.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from pathlib import Path

folder, cgroup, rounds, share, bound = sys.argv[5:]
if cgroup != "none":
    (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))

import jax
import numpy as np
from joined import count, index, root
from sharded_state import mesh

from holdfast import multihost
from holdfast.checkpoint import (
    CheckpointManager,
    EveryNSteps,
    KeepLast,
    Local,
    Options,
)
from holdfast.checkpoint.memory.budget import USE
from holdfast.checkpoint.memory.host import look_at_memory

LEAVES = 4
ROWS = 8192  # of 4 KiB: 32 MiB a leaf on each process
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
shape = (count * ROWS, 1024)
like = {f"w{i}": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for i in range(LEAVES)}
state_bytes = LEAVES * shape[0] * shape[1] * 4


def state(step):
    def rows(index):
        # Aligned, so that jax takes it as it is; it goes back to the system with its array.
        memory = np.frombuffer(mmap.mmap(-1, ROWS * 4096), np.float32).reshape(ROWS, 1024)
        memory[:] = step * 1000 + (index[0].start or 0)
        return memory

    return {name: jax.make_array_from_callback(shape, sharding, rows) for name in like}


def same(got, step):
    for array in got.values():
        for shard in array.addressable_shards:
            value = step * 1000 + (shard.index[0].start or 0)
            assert (np.asarray(shard.data) == value).all(), step


def set_limit():
    """Bounds the cgroup by what it has in use now, the state among it, and `share` times the state
    more; files that are only cached do not count.
    """
    group = Path(cgroup)
    limit_file = group / "memory.limit_in_bytes"
    usage_file = group / "memory.usage_in_bytes"
    if not limit_file.exists():
        limit_file = group / "memory.max"
        usage_file = group / "memory.current"
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = int(stat["active_file"]) + int(stat["inactive_file"])
    in_use = int(usage_file.read_text()) - cached
    limit_file.write_text(str(in_use + int(float(share) * state_bytes)))
    print("in use before:", in_use, "state:", state_bytes, flush=True)


options = Options(host_memory_bytes=int(bound) or None, save_timeout_s=120)
place = os.path.join(folder, f"h{index}")
local = Local(place, save_policy=EveryNSteps(1), timeout_s=120, failure_domain=f"h{index}")
with CheckpointManager(
    root, save_policy=EveryNSteps(2), keep_policy=KeepLast(1), local=local, options=options
) as manager:
    held = state(0)
    multihost.sync_global_processes("started")
    if index == 0 and cgroup != "none":
        set_limit()
    multihost.sync_global_processes("limited")
    free = look_at_memory()[0].free_bytes
    del held
    multihost.sync_global_processes("looked")
    step = 0
    while min(manager.statistics()[name] for name in ("saves", "local_saves")) < int(rounds):
        step += 1
        held = state(step)
        multihost.sync_global_processes("a step of training")
        is_saved = bool(manager.save(step, held))
        manager.wait_until_finished()
        del held
        gc.collect()
        if not is_saved:  # no host is asked before all have agreed on a step
            continue
        got = manager.restore(step, like=like)
        same(got, step)
        del got
        gc.collect()
        print("round", step, flush=True)
    counted = manager.statistics()
    multihost.sync_global_processes("done")
print(
    "report",
    json.dumps(
        {
            "free": free,
            "peak": USE.peak_bytes,
            "state": state_bytes,
            "blocked_s": counted["save_blocked_s"],
            "saves": counted["saves"],
            "local_saves": counted["local_saves"],
        }
    ),
    flush=True,
)

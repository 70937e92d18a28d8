"""Runs in the processes of tests/system/test_local_tier.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from jax._src import distributed
from joined import index, root
from sharded_state import same, state

from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, Local

folder = os.path.join(sys.argv[5], f"h{index}")
wanted = int(sys.argv[6])
early = int(sys.argv[7])
coordinator = distributed.global_state.client


def files(path):
    return sum(len(names) for _, _, names in os.walk(path))


def held():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    keys = [key for key, _ in coordinator.key_value_dir_get_bytes("holdfast")]
    return {
        "files": files(folder),
        "of the root": files(os.path.join(root, ".holdfast")),
        "keys": keys,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def show(when):
    print(when, json.dumps(held()), flush=True)


local = Local(folder, save_policy=EveryNSteps(1), keep=2, timeout_s=20, failure_domain=f"h{index}")
with CheckpointManager(
    root, save_policy=EveryNSteps(50), keep_policy=KeepLast(2), local=local
) as manager:
    step = saves = 0
    while saves < wanted:
        step += 1
        manager.save(step, state(step, 64))
        manager.wait_until_finished()
        if step % 47 == 0 and saves:
            newest = manager.latest_step()
            assert same(manager.restore(like=state(0, 64)), newest, 64)
        if manager.statistics()["local_saves"] > saves:
            saves += 1
            if saves == early:
                show("early")
    show("late")
    found = manager.statistics()
    assert (
        len(manager.local_steps()) == 2
        and found["local_saves_failed"] == 0
        and found["local_restores"] > wanted / 100
    ), found
coordinator.wait_at_barrier("closed", 60_000)
until = time.monotonic() + 30
# The last of both deletes them, in the background.
while held()["keys"] and time.monotonic() < until:
    time.sleep(0.05)
show("closed")

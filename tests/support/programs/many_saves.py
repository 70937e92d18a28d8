"""Saves over and over, and prints what this process holds after each quarter of the saves: threads,
file handles, resident KiB; then the steps that are left.

argv: index, count, the root, and how many saves.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from holdfast.checkpoint import CheckpointManager, KeepLast

root = sys.argv[3]
saves = int(sys.argv[4])


def held(threads):
    """Waits for threads beyond so many that are about to end."""
    gc.collect()
    end = time.monotonic() + 10
    while (found := len(os.listdir("/proc/self/task"))) > threads and time.monotonic() < end:
        time.sleep(0.01)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") // 1024
    return found, len(os.listdir("/proc/self/fd")), resident


state = {f"layer{i}": {"w": jnp.ones((64, 64)), "n": np.ones(10)} for i in range(10)}
with CheckpointManager(root, keep_policy=KeepLast(3)) as manager:
    loads = []
    for step in range(saves):
        manager.save(step, state)
        if step % (saves // 4) == saves // 4 - 1:
            manager.wait_until_finished()
            manager._state.worker.wait(60)
            loads.append(held(loads[0][0] if loads else 1 << 20))
    assert manager._state.index.steps() == manager.all_steps()
    print(json.dumps({"loads": loads, "steps": manager.all_steps()}))

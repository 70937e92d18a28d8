"""Runs in the processes of tests/system/test_grain.py."""

from __future__ import annotations

import fcntl
import json
import os
import signal

from elastic_reader import reader
from joined import count, index, root
from sharded_state import state

from holdfast.checkpoint import CheckpointManager

own = reader(index, count)
alive = os.open(f"{root}-{index}", os.O_CREAT | os.O_WRONLY)
fcntl.flock(alive, fcntl.LOCK_EX)  # until this process is dead
seen = []
with CheckpointManager(root) as manager:
    for _ in range(3):
        seen += next(own).tolist()
    manager.save(3, items={"reader": own, "model": state(3)}).wait()
    next(own), next(own)
    print("seen", json.dumps(seen), flush=True)
    if index == 0:  # jax's coordinator is in it: whoever outlives that is aborted
        for other in range(1, count):
            fcntl.flock(os.open(f"{root}-{other}", os.O_RDONLY), fcntl.LOCK_EX)
    os.kill(os.getpid(), signal.SIGKILL)

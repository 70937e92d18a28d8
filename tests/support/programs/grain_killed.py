"""Runs in the processes of tests/system/test_grain.py."""

from __future__ import annotations

import json
import os
import signal

from elastic_reader import reader
from joined import count, index, root
from sharded_state import state

from holdfast.checkpoint import CheckpointManager

own = reader(index, count)
seen = []
with CheckpointManager(root) as manager:
    for _ in range(3):
        seen += next(own).tolist()
    manager.save(3, items={"reader": own, "model": state(3)}).wait()
    next(own), next(own)
    print("seen", json.dumps(seen), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

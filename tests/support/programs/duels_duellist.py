"""Runs in the processes of tests/system/test_duels.py."""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from holdfast.checkpoint import CheckpointManager, Options, StepExists

index = int(sys.argv[1])
root = sys.argv[3]
first = int(sys.argv[4])
last = int(sys.argv[5])
if "HOLDFAST_TESTS_TRACES" in os.environ:
    from tests.support.tracing import trace

    trace(root, f"process {index}")
won = []
with (
    open(f"{root}.go{index}", "rb", buffering=0) as go,
    CheckpointManager(root, options=Options(incremental=bool(int(sys.argv[6])))) as manager,
):
    for step in range(first, last):
        print("ready", step, flush=True)
        # Both begin each step at about the same moment: each waits for a byte that the test sends
        # to both.
        go.read(1)
        try:
            manager.save(step, {"who": np.full(2000, index), "step": np.full(10, step)})
            manager.wait_until_finished()
            won.append(step)
        except StepExists:
            pass
print("won", json.dumps(won), flush=True)

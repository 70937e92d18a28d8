"""Runs in the processes of tests/system/test_power_cut.py."""

from __future__ import annotations

import os
import sys

import numpy as np
from power_cut_start import incremental, settings

from holdfast.checkpoint import CheckpointManager

if "HOLDFAST_TESTS_TRACES" in os.environ:
    from tests.support.tracing import trace

    trace(sys.argv[1], "saver")
with CheckpointManager(sys.argv[1], **settings) as manager:
    for step in range(1, 1 + int(sys.argv[2])):
        manager.save(
            step, {f"w{i}": np.arange(100_000) + step * (i > 2) for i in range(4)} | {"step": step}
        )
        manager.wait_until_finished()
        print(step, flush=True)
        sys.stdin.readline()
    assert bool(manager.statistics()["save_linked_bytes"]) == incremental
    assert len(manager.local_steps()) == (sys.argv[3] == "local")

"""Runs in the processes of tests/system/test_endings.py: leaves its job with a save in flight."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from holdfast import multihost

multihost.initialize()
from holdfast.checkpoint import CheckpointManager, Options

folder, how = sys.argv[1:]
ends = threading.Event()


def slowly(progress: object) -> None:
    ends.wait(60)
    time.sleep(0.5)  # as a slow store


def save(step: int) -> CheckpointManager:
    manager = CheckpointManager(f"{folder}/{step}", options=Options(progress=slowly))
    manager.save(step, {"w": np.arange(8)}, metrics={"loss": 0.5})
    return manager


kept = save(1)
save(2)  # and the manager is dropped
ends.set()
if how == "shutdown":
    multihost.shutdown()
    assert kept.all_steps() == [1]
    kept.close()
elif how == "error":
    raise ValueError("the program's own")

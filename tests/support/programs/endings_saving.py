"""Runs in the processes of tests/system/test_endings.py."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from holdfast import multihost

multihost.initialize()
from holdfast.checkpoint import CheckpointManager
from holdfast.checkpoint.storage.local import LocalStorage

folder = sys.argv[1]
me = int(os.environ["HOLDFAST_PROCESS_ID"])
commit = LocalStorage.commit


def slow(self, name, *arguments, **options):
    open(f"{folder}.committing", "x").close()
    time.sleep(2)  # as a slow store
    return commit(self, name, *arguments, **options)


LocalStorage.commit = slow
manager = CheckpointManager(folder)
manager.save(1, {"w": np.arange(8)})
while me == 2 and not os.path.exists(f"{folder}.committing"):
    time.sleep(0.01)
if me == 2:
    os.kill(os.getpid(), signal.SIGKILL)
manager.wait_until_finished()
print("saved", flush=True)
time.sleep(600)

"""Runs in the processes of tests/system/test_one_saves.py: one of them does not save step 4."""

from __future__ import annotations

import logging
import sys
import traceback

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, Options
from holdfast.checkpoint.agreement import absence
from holdfast.checkpoint.saving import commit
from holdfast.coordination import HoldfastError

index = int(sys.argv[1])
absent = int(sys.argv[5])
logging.basicConfig(level=logging.WARNING)
logging.getLogger("holdfast.multihost.start").setLevel(logging.INFO)
absence.LATE_S = 0.5
commit.RESULT_WAIT_S = 5.0
multihost.initialize(f"127.0.0.1:{sys.argv[3]}", int(sys.argv[2]), index)
manager = CheckpointManager(sys.argv[4], options=Options(save_timeout_s=4))
manager.save(1, {"w": 1})
manager.wait_until_finished()


def train() -> None:
    if index == absent:
        multihost.sync_global_processes("end")


if index != absent:
    manager.save(4, {"w": 4})
    try:
        manager.wait_until_finished()
    except HoldfastError as error:
        traceback.print_exception(error, file=sys.stdout)
        print(f"{type(error).__name__}: {error}", flush=True)
    multihost.sync_global_processes("end")
train()
manager.close()

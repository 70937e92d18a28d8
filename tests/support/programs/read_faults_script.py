"""Runs in the processes of tests/system/test_read_faults.py."""

from __future__ import annotations

import ctypes
import json
import logging
import sys

import numpy as np

from holdfast.checkpoint import CheckpointError, CheckpointManager, Options, load, verify
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert

root = sys.argv[1]
which = sys.argv[2]
number = int(sys.argv[3])
times = int(sys.argv[4])
logging.disable()
preloaded = ctypes.CDLL(None)


def tree(step):
    return {
        "w": np.arange(300_000.0) + step,
        "v": np.full(3, step),
        "name": f"step {step}",
    }


def same(got, step):
    return (
        np.array_equal(got["w"], tree(step)["w"])
        and np.array_equal(got["v"], tree(step)["v"])
        and got["name"] == f"step {step}"
    )


with CheckpointManager(root + "/run") as manager:
    for step in (1, 2):
        manager.save(step, tree(step), metrics={"loss": step}, metadata=step)
convert(open_checkpoint(root + "/run"), StorePath(open_storage(root + "/flat"), ""), "safetensors")
manager = CheckpointManager(root + "/run", options=Options(read_only=True))
calls = {
    "restore": lambda: same(manager.restore(), 2),
    "restore a step": lambda: same(manager.restore(1, like=tree(0)), 1),
    "fallback": lambda: same(manager.restore(fallback=True), 2),
    "load": lambda: same(load(root + "/run"), 2),
    "load safetensors": lambda: np.array_equal(load(root + "/flat")["w"], tree(2)["w"]),
    "verify": lambda: verify(root + "/run").step == 2,
    "metrics": lambda: manager.metrics(2) == {"loss": 2},
    "metadata": lambda: manager.metadata(2) == 2,
    "all_steps": lambda: manager.all_steps() == [1, 2],
    "best_step": lambda: manager.best_step("loss") == 1,
}
for at in range(1000):
    preloaded.readfault_arm((root + "/").encode(), ctypes.c_long(at), ctypes.c_long(times), number)
    try:
        how = "exact" if calls[which]() else "wrong"
        kind = ""
        text = ""
    except Exception as error:
        how = "typed" if isinstance(error, CheckpointError) else "raw"
        kind = type(error).__name__
        text = str(error)
    reached = preloaded.readfault_count() > at
    preloaded.readfault_arm(b"", ctypes.c_long(0), ctypes.c_long(0), 0)
    print(json.dumps([how, kind, text, reached]), flush=True)
    if not reached:
        break
manager.close()

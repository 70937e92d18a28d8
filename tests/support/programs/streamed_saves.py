"""Saves step 2 into the root that each line of its input names, in a fork that may be killed by its
server, and looks in another fork at what is left. Prints one line for each.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import urllib.request
from typing import Any

import numpy as np

from holdfast.checkpoint import CheckpointManager, Options, verify
from holdfast.checkpoint.storage import bucket

PART_BYTES = 5 << 20  # the least that S3 takes
bucket.PART_BYTES = PART_BYTES
OPTIONS = Options(claim_age_s=0.001)  # a writer that was killed counts as dead at once


def state(step: int) -> dict[str, Any]:
    """Returns a tree whose pack goes in three parts."""
    return {"w": np.full(2 * PART_BYTES + 9, step, np.uint8)}


def save(url: str, server: str) -> None:
    """Saves steps 1 and 2, the second one with a server that may kill this process."""
    with CheckpointManager(url) as manager:
        manager._state.worker.wait(60)
        manager.save(1, state(1)).wait()
        manager._state.worker.wait(60)
        urllib.request.urlopen(f"{server}/-/arm/{os.getpid()}", timeout=60).close()
        manager.save(2, state(2)).wait()
        urllib.request.urlopen(f"{server}/-/acknowledged", timeout=60).close()


def check(url: str) -> list[int]:
    """Returns the steps that are listed, after it has read them, swept, and saved another."""
    place, _, query = url.partition("?")
    with CheckpointManager(url, options=OPTIONS) as manager:
        manager._state.worker.wait(60)
        steps = manager.all_steps()
        manager.save(3, state(3)).wait()
        for step in [*steps, 3]:
            assert np.array_equal(manager.restore(step)["w"], state(step)["w"]), step
            verify(f"{place}/{step}?{query}")
        manager._state.worker.wait(60)
        names = manager._root.storage.list("", recursive=True)
    packs = [entry.name for entry in names if entry.name.endswith(".safetensors")]
    assert sorted({int(name.partition("/")[0]) for name in packs}) == [*steps, 3]
    assert len(packs) == len(steps) + 1
    return steps


def forked(work: Any) -> int:
    """Runs `work` in a child; returns how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


for line in sys.stdin:
    root, address = json.loads(line)
    ended = forked(lambda: save(root, address))
    print(json.dumps({"ended": ended}), flush=True)
    sys.stdin.readline()  # the server is well again
    read, write = os.pipe()
    checked = forked(lambda: os.write(write, json.dumps(check(root)).encode()))
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    print(json.dumps({"checked": checked, "steps": json.loads(text or "[]")}), flush=True)

"""The fork server of killpoints.py for a job that goes back: for each point a root of steps 1 to 3,
a save of step 2 by a process that has restored step 1, and a check of what is left.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import CheckpointManager, KeepLast
from holdfast.coordination import HoldfastError
from tests.support.tracing import log_there, trace

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_arm.argtypes = (ctypes.c_long, ctypes.c_int)
LIBRARY.killpoint_count.restype = ctypes.c_long
BASE = 1
SAVED = 2
NEWEST = 3


def state(number: int) -> dict[str, Any]:
    return {"a": np.arange(3000) + number, "number": number}


def number_at(manager: CheckpointManager, step: int | None = None) -> int:
    """Restores a step, asserts that it is whole, and returns what was saved there."""
    found = manager.restore(step)
    number = int(found["number"])
    assert np.array_equal(found["a"], state(number)["a"])
    return number


def make(root: Path) -> None:
    with CheckpointManager(root) as manager:
        for step in (BASE, SAVED, NEWEST):
            manager.save(step, state(step)).wait()


def attempt(root: Path, known: Path, point: int, error: int) -> list[Any]:
    """Goes back to the base and saves; returns how that ended, and if the point was reached."""
    how = "saved"
    trace(root, "process 0")
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        manager._state.worker.wait()
        assert number_at(manager, BASE) == BASE
        LIBRARY.killpoint_arm(point, error)
        try:
            manager.save(SAVED, state(-1)).wait()
            os.mknod(known)  # a call that killpoint.c does not count
        except HoldfastError as failed:
            how = type(failed).__name__
        manager._state.worker.wait()
        reached = LIBRARY.killpoint_count() > point
        LIBRARY.killpoint_arm(-1, 0)
    return [how, reached]


def check(root: Path, known: bool) -> dict[str, Any]:
    """Opens the root as the next run would. Before the mark nothing has happened, after it the base
    is the newest, after the commit the new step. What was left, and not overtaken, is there.
    """
    trace(root, "the next run")
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        steps = manager.all_steps()
        left = manager.left_steps()
        newest = manager.latest_step()
        assert newest is not None
        at_newest = number_at(manager)
        assert (newest, at_newest) in [(NEWEST, NEWEST), (BASE, BASE), (SAVED, -1)], (newest, left)
        assert not known or newest == SAVED, newest
        assert number_at(manager, NEWEST) == NEWEST
        assert left == {NEWEST: [], BASE: [SAVED, NEWEST], SAVED: [NEWEST]}[newest], (newest, left)
        if newest != SAVED:
            assert steps == [BASE, SAVED, NEWEST] and number_at(manager, SAVED) == SAVED
        # The next run goes on.
        if newest != NEWEST:
            manager.restore()
            manager.save(newest + 1, state(-2)).wait()
            assert manager.latest_step() == newest + 1
            manager.save(NEWEST + 1, state(-3)).wait()
            assert manager.all_steps() == [NEWEST + 1]
    return {"newest": newest}


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """Runs `work` in a child; returns its exit code, and what it returned."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            os.write(write, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(said) if said else None


def main() -> None:
    logging.disable(logging.WARNING)
    assert threading.active_count() == 1, "only what has no threads may fork"
    scratch = Path(sys.argv[1])
    error = int(sys.argv[2])
    template = scratch / "template"
    assert forked(lambda: make(template))[0] == 0
    for point in json.loads(sys.argv[3]):
        root = scratch / str(point)
        known = scratch / f"{point}.known"
        shutil.copytree(template, root)
        log_there(root)
        code, said = forked(lambda: attempt(root, known, point, error))  # noqa: B023
        assert code in (0, -signal.SIGKILL), code
        how, reached = said or ["killed", True]
        checked, found = forked(lambda: check(root, known.exists()))  # noqa: B023
        assert checked == 0, (point, how)
        print(json.dumps({"point": point, "how": how, "reached": reached} | found), flush=True)
        shutil.rmtree(root)
        if not reached:
            return


main()

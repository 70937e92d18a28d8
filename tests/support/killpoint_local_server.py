"""Kills or fails local saves at the nth call below the folder of a host: a fork server as killpoint_server.py, of one process."""

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

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local
from holdfast.multihost import Solo

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_arm_below.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_long, ctypes.c_int)
LIBRARY.killpoint_count.restype = ctypes.c_long
DURABLE, LOCAL, LAST = 1, 2, 6


def state(step: int) -> dict[str, Any]:
    return {"a": np.arange(30_000) + step, "b": np.full(7, step), "step": step}


def opened(folder: Path) -> CheckpointManager:
    local = Local(folder / "host", save_policy=EveryNSteps(1))
    return CheckpointManager(folder / "root", save_policy=EveryNSteps(1000), group=Solo(), local=local)


def restore(manager: CheckpointManager) -> int:
    """Restores the newest step, asserts that it is what was saved, and returns which it is."""
    found = manager.restore()
    assert all(np.array_equal(found[name], wanted) for name, wanted in state(found["step"]).items())
    return int(found["step"])


def make(folder: Path) -> Any:
    with opened(folder) as manager:
        manager.save(DURABLE, state(DURABLE), force=True)
        manager.wait_until_finished()
        manager.save(LOCAL, state(LOCAL))
    return None


def attempt(folder: Path, point: int, error: int) -> Any:
    """Goes on from what is there and saves on the host, with the nth call below its folder armed; notes each step that it knows."""
    LIBRARY.killpoint_arm_below(str(folder / "host").encode(), point, error, 1, 0)
    with opened(folder) as manager:
        first = restore(manager)
        for step in range(first + 1, LAST):
            manager.save(step, state(step))
            manager.wait_until_finished()
            if manager.local_steps() == [step]:
                (folder / f"known{step}").touch()
        failed, off = manager.statistics()["local_saves_failed"], manager.statistics()["local_off"]
    reached = LIBRARY.killpoint_count() > point
    LIBRARY.killpoint_disarm()
    return {"reached": reached, "first": first, "failed": failed, "off": off}


def check(folder: Path, killed: bool) -> Any:
    """Opens it as the next attempt would: what was known is there, or newer, to the bit; the next local save leaves nothing behind."""
    known = max([int(path.name[5:]) for path in folder.glob("known*")], default=LOCAL if killed else DURABLE)
    with opened(folder) as manager:
        newest = restore(manager)
        assert known <= newest < LAST, (known, newest)
        manager.save(LAST, state(LAST))
        manager.wait_until_finished()
        assert manager.local_steps() == [LAST] and restore(manager) == LAST
    files = sorted(path.name for path in (folder / "host").rglob("*") if path.is_file() and not path.name.startswith("mark-"))
    assert [name.partition("-")[0] for name in files] == ["00000", "part"], files
    return {"newest": newest, "known": known}


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Runs `work` in a fork; returns its exit code, and what it returned."""
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
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(said or "null")


def main() -> None:
    logging.disable(logging.WARNING)
    assert threading.active_count() == 1, "only what has no threads may fork"
    scratch, error, points = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    assert in_child(lambda: make(scratch / "template"))[0] == 0
    for point in points:
        folder = scratch / str(point)
        shutil.copytree(scratch / "template", folder)
        code, found = in_child(lambda folder=folder, point=point: attempt(folder, point, error))
        assert code == 0 or (code == -signal.SIGKILL and not error), code
        code, checked = in_child(lambda folder=folder, code=code: check(folder, code != 0))
        assert code == 0, (point, found)
        print(json.dumps({"point": point, "reached": True} | (found or {}) | checked), flush=True)
        shutil.rmtree(folder)
        if found is not None and not found["reached"]:
            return


main()

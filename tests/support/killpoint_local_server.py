"""Kills or fails local saves at the nth call below the folder of a host: a fork server as
killpoint_server.py, for one process or two.

Two are a host each, owner and ward of one another: they write, pull, serve and delete, and restore
from whoever has the copy. They are in step with each other, so that the calls come in much the same
order each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local, Options
from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.saving.stager import SaveOrder
from holdfast.checkpoint.steps.lineage import BRANCHES, Branch, where_of
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import CoordinationClient, CoordinationService, HoldfastError, Timeouts
from holdfast.multihost import ClusterGroup, Group, Solo

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_arm_below.argtypes = (
    ctypes.c_char_p,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_long,
    ctypes.c_int,
)
LIBRARY.killpoint_count.restype = ctypes.c_long
DURABLE = 1
LOCAL = 2
LAST = 6


def state(step: int, rank: int) -> dict[str, Any]:
    return {
        "a": np.arange(30_000) + step,
        "b": np.full(7, step),
        "mine": np.arange(5000) + 100 * step + rank,
        "step": step,
    }


@contextlib.contextmanager
def opened(folder: Path, group: Group) -> Iterator[CheckpointManager]:
    host = f"host{group.index}"
    local = Local(
        folder / host,
        save_policy=EveryNSteps(1),
        timeout_s=10,
        address="127.0.0.1",
        failure_domain=host,
    )
    options = Options(
        per_process=lambda path: path == "mine", save_timeout_s=30, restore_timeout_s=30
    )
    with CheckpointManager(
        folder / "root", save_policy=EveryNSteps(1000), group=group, options=options, local=local
    ) as manager:
        yield manager


def save(manager: CheckpointManager, group: Group, step: int) -> bool:
    """Saves a step on the hosts, and says whether it is known. In a group the primary chooses when
    that is: here it is now.
    """
    tier = manager._catalog.tier
    assert isinstance(tier, LocalSteps)
    if group.count == 1:
        manager.save(step, state(step, 0))
    elif not tier.statistics()["local_off"]:
        manager._parts.lanes[1].save(SaveOrder(step, state(step, group.index)))
    manager.wait_until_finished()
    return manager.local_steps() == [step]


def restore(manager: CheckpointManager, rank: int) -> int:
    """Restores the newest step, asserts that it is what was saved, and returns which it is."""
    found = manager.restore()
    assert all(
        np.array_equal(found[name], wanted) for name, wanted in state(found["step"], rank).items()
    )
    return int(found["step"])


def make(folder: Path, group: Group) -> Any:
    with opened(folder, group) as manager:
        manager.save(DURABLE, state(DURABLE, group.index), force=True)
        manager.wait_until_finished()
        assert save(manager, group, LOCAL)


def attempt(folder: Path, victim: int, point: int, error: int, group: Group) -> Any:
    """Goes on from what is there and saves, with the nth call below the victim's folder armed;
    notes each step that it knows.
    """
    if group.index == victim:
        LIBRARY.killpoint_arm_below(str(folder / f"host{victim}").encode(), point, error, 1, 0)
    found: dict[str, Any] = {"saved": 0, "failed": 0, "off": "", "ended": ""}
    try:
        with opened(folder, group) as manager:
            for step in range(restore(manager, group.index) + 1, LAST):
                if save(manager, group, step):
                    (folder / f"known{step}").touch()
                    found["saved"] += 1
            found["failed"], found["off"] = (
                manager.statistics()["local_saves_failed"],
                manager.statistics()["local_off"],
            )
    except HoldfastError as failed:
        found["ended"] = type(failed).__name__
    found["reached"] = LIBRARY.killpoint_count() > point
    LIBRARY.killpoint_disarm()
    return found


def check(folder: Path, known: int, group: Group) -> Any:
    """Opens it as the next attempt would: what was known is there, or newer, to the bit; the next
    local save leaves nothing behind.
    """
    with opened(folder, group) as manager:
        newest = restore(manager, group.index)
        assert known <= newest < LAST, (known, newest)
        assert save(manager, group, LAST), manager.statistics()
        assert restore(manager, group.index) == LAST
    found = (folder / f"host{group.index}").rglob("*")
    files = sorted(
        path.name for path in found if path.is_file() and not path.name.startswith("mark-")
    )
    packs = [f"{rank:05d}" for rank in range(group.count)]
    assert [name.partition("-")[0] for name in files] == packs + ["part"] * group.count, files
    return {"newest": newest}


class Child:
    """A fork that does `work` as one process of a job, and says in JSON what came of it."""

    def __init__(self, work: Callable[[Group], Any], address: str, index: int, count: int) -> None:
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write)
            return
        try:
            os.close(self._read)
            os.write(write, json.dumps(_run(work, address, index, count)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)

    def ended(self) -> tuple[int, Any]:
        """Returns its exit code, and what it said."""
        with os.fdopen(self._read) as stream:
            said = stream.read()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]), json.loads(said or "null")


def _run(work: Callable[[Group], Any], address: str, index: int, count: int) -> Any:
    if count == 1:
        return work(Solo())
    client = CoordinationClient(address, index, timeouts=Timeouts(init_s=30, shutdown_s=5))
    client.connect()
    try:
        return work(ClusterGroup(client, index, count))
    finally:
        with contextlib.suppress(HoldfastError):  # the other one was killed
            client.shutdown()


def together(count: int, work: Callable[[Group], Any]) -> list[tuple[int, Any]]:
    """Does `work` in the processes of one job, each a fork; returns how they ended, and what they
    said.
    """
    with contextlib.ExitStack() as stack:
        address = ""
        if count > 1:
            address = stack.enter_context(
                CoordinationService.spawn(count, arguments=("--reconnect-grace-s", "0.1"))
            ).address
        return [
            child.ended()
            for child in [Child(work, address, index, count) for index in range(count)]
        ]


def adopt(root: Path) -> None:
    """Has the openings of a copied root say that they were written here: it is the same root."""
    where = where_of(LocalStorage(root))
    for path in (root / BRANCHES).iterdir():
        fields = json.loads(path.read_bytes())
        del fields["crc32c"]
        path.write_bytes(Branch(**fields | {"where": where}).to_bytes())


def main() -> None:
    logging.disable(logging.WARNING)
    assert threading.active_count() == 1, "only what has no threads may fork"
    scratch, count, victim, error, points = (
        Path(sys.argv[1]),
        *map(int, sys.argv[2:5]),
        json.loads(sys.argv[5]),
    )
    assert [code for code, _ in together(count, partial(make, scratch / "template"))] == [0] * count
    for point in points:
        folder = scratch / str(point)
        shutil.copytree(scratch / "template", folder)
        adopt(folder / "root")
        ended = together(count, partial(attempt, folder, victim, point, error))
        killed = ended[victim][0] == -signal.SIGKILL and not error
        assert all(
            code == 0 or (index == victim and killed) for index, (code, _) in enumerate(ended)
        ), (point, ended)
        known = max(
            [int(path.name[5:]) for path in folder.glob("known*")],
            default=LOCAL if killed or count > 1 else DURABLE,
        )
        if count > 1 and point % 3:  # one host of the group may be lost besides
            shutil.rmtree(folder / f"host{point % 3 - 1}", ignore_errors=True)
        checked = together(count, partial(check, folder, known))
        assert all(code == 0 for code, _ in checked), (point, ended)
        reached = killed or ended[victim][1]["reached"]
        line = {
            "point": point,
            "reached": reached,
            "killed": killed,
            "known": known,
            "newest": checked[0][1]["newest"],
        }
        print(json.dumps(line | {"ended": [said for _, said in ended if said]}), flush=True)
        shutil.rmtree(folder)
        if not reached:
            return


main()

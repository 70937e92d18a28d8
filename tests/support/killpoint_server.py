"""The fork server of killpoints.py: for each point a fresh root, a save in forked processes, and a
check of what is left.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, KeepLast, Options
from holdfast.coordination import CoordinationService, HoldfastError, ServiceTimeouts
from holdfast.multihost import Group, Solo
from tests.support.tracing import log_there, trace

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_arm.argtypes = (ctypes.c_long, ctypes.c_int)
LIBRARY.killpoint_count.restype = ctypes.c_long
HEARTBEAT_S = 2.0


class Reader:
    """A data iterator: its state is what every process writes."""

    def __init__(self, at: int) -> None:
        self.at = at

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def items(step: int, process: int = 0, mesh: Mesh | None = None) -> dict[str, Any]:
    """Returns what is saved. With a mesh of two processes `w` lies on both, so that both write
    packs; `own` each keeps for itself.
    """
    w: Any = np.arange(4000, dtype=np.float32).reshape(2, 2000) + step
    if mesh is not None:
        w = jax.make_array_from_callback(
            w.shape, NamedSharding(mesh, PartitionSpec("x")), lambda index, whole=w: whole[index]
        )
    state = {
        "base": np.arange(20_000),
        "a": np.arange(3000) + step,
        "b": {"c": np.full(7, step)},
        "w": w,
        "own": np.full(5, 100 * step + process),
    }
    return {"state": state, "data": Reader(step + process)}


INCREMENTAL = len(sys.argv) > 6 and sys.argv[6] == "incremental"
OPTIONS = Options(per_process=lambda path: path == "own", incremental=INCREMENTAL)


def save(root: Path, group: Group, mesh: Mesh | None, then: Callable[[], None]) -> str:
    """Saves step 3; returns "saved", or the error's name. Any error that is not of the tree comes
    through.
    """
    try:
        with CheckpointManager(
            root, keep_policy=KeepLast(2), group=group, options=OPTIONS
        ) as manager:
            manager._state.worker.wait()
            if INCREMENTAL:  # something to link to
                manager.save(2, items=items(2, group.index, mesh), overwrite=True)
                manager.wait_until_finished()
            manager.save(3, items=items(3, group.index, mesh))
            manager.wait_until_finished()
            then()
        return "saved"
    except HoldfastError as error:
        return type(error).__name__


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Runs `work` in a child; returns its pid and a pipe on which it says, in JSON lines, how it
    went.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        os.write(write, json.dumps(work()).encode() + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def ended(child: tuple[int, int]) -> tuple[int, str]:
    pid, read = child
    with os.fdopen(read) as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def attempt(root: Path, processes: int, victim: int, point: int, error: int) -> dict[str, Any]:
    """Saves step 3 with `victim` armed; says how each process ended, whether any knew of the
    commit, and whether the point was reached.
    """

    def member(index: int, address: str) -> Any:
        group = Solo()
        mesh = None
        if processes > 1:
            multihost.initialize(address, processes, index, heartbeat_timeout_s=HEARTBEAT_S)
            group = multihost.default_group()
            mesh = Mesh(np.array(jax.devices()), "x")
            group.barrier("armed", timeout_s=60)
        trace(root, f"process {index}")
        known = root.parent / f"{root.name}.known{index}"
        if index == victim:
            LIBRARY.killpoint_arm(point, error)
        how = save(
            root, group, mesh, lambda: os.mknod(known)
        )  # a call that killpoint.c does not count
        reached = index != victim or LIBRARY.killpoint_count() > point
        LIBRARY.killpoint_arm(-1, 0)
        return [how, reached]

    with contextlib.ExitStack() as stack:
        address = ""
        if processes > 1:
            options: dict[str, Any] = {
                "recoverable": True,
                "survivable": True,
                "timeouts": ServiceTimeouts(heartbeat_s=HEARTBEAT_S),
            }
            address = stack.enter_context(CoordinationService.spawn(processes, **options)).address
        results = [
            ended(child)
            for child in [
                fork(lambda index=index: member(index, address)) for index in range(processes)
            ]
        ]
    assert all(code in (0, -signal.SIGKILL) for code, _ in results), results
    said = [json.loads(text) if text else ["killed", True] for _, text in results]
    known = any((root.parent / f"{root.name}.known{index}").exists() for index in range(processes))
    return {
        "point": point,
        "how": [how for how, _ in said],
        "known": known,
        "reached": all(reached for _, reached in said),
    }


def check_step(manager: CheckpointManager, step: int, processes: int) -> None:
    """Asserts that a step is bit-exact, for each process that saved it."""
    for process in range(processes if step == 3 else 1):
        got = manager.restore(step, process=process)
        want = items(step, process)["state"]
        for name, found in (
            ("base", got["base"]),
            ("a", got["a"]),
            ("w", got["w"]),
            ("own", got["own"]),
        ):
            assert np.array_equal(found, want[name]), (step, process, name)
        assert np.array_equal(got["b"]["c"], want["b"]["c"]), step
        assert (
            manager.restore(step, like=Reader(0), item="data", process=process).at == step + process
        )


def check(root: Path, known: bool, processes: int) -> dict[str, Any]:
    """Opens the root as the next attempt would: listed steps are exact, what was known is there,
    the next save leaves nothing behind.
    """
    trace(root, "the next attempt")
    linked = any(path.stat().st_nlink > 1 for path in root.glob("3/*/*"))
    with CheckpointManager(root, keep_policy=KeepLast(2), group=Solo(), options=OPTIONS) as manager:
        manager._state.worker.wait()
        steps = manager.all_steps()
        assert (
            2 in steps
            and set(steps) <= {1, 2, 3}
            and (3 in steps or not known)
            and (1 in steps or 3 in steps)
        ), (steps, known)
        for step in steps:
            check_step(manager, step, processes)
        manager.save(4, items=items(4))
        manager.wait_until_finished()
        kept = manager.all_steps()
    assert len(kept) == 2 and kept[-1] == 4, kept
    records = {step: json.loads((root / f"{step}/checkpoint.json").read_text()) for step in kept}
    assert records.get(3, {"processes": processes})["processes"] == processes
    named = {
        f"{step}/{name}"
        for step, found in records.items()
        for item in found["items"].values()
        for name, *_ in item["files"]
    }
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == named | {f"{step}/checkpoint.json" for step in kept}, left
    packs = {name.split("/")[2][:5] for name in named if name.startswith("3/state/")}
    assert packs in (
        set(),
        {f"{process:05d}" for process in range(processes)},
    ), "each process writes packs"
    assert os.listdir(root / ".holdfast") == [] and len(os.listdir(root)) == 3, os.listdir(root)
    return {"steps": steps, "linked": linked}


def make(root: Path) -> bool:
    with CheckpointManager(root, group=Solo(), options=OPTIONS) as manager:
        for step in (1, 2):
            manager.save(step, items=items(step))
    return True


def main() -> None:
    logging.disable(logging.WARNING)
    assert threading.active_count() == 1, "only what has no threads may fork"
    scratch, processes, victim, error, points = (
        Path(sys.argv[1]),
        *map(int, sys.argv[2:5]),
        json.loads(sys.argv[5]),
    )
    template = scratch / "template"
    assert ended(fork(lambda: make(template)))[0] == 0
    for point in points:
        root = scratch / str(point)
        shutil.copytree(template, root)
        log_there(root)
        found = attempt(root, processes, victim, point, error)
        code, said = ended(
            fork(lambda root=root, found=found: check(root, found["known"], processes))
        )
        assert code == 0, (found, code)
        print(json.dumps(found | json.loads(said)), flush=True)
        shutil.rmtree(root)
        if not found["reached"]:
            return


main()

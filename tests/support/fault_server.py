"""The fork server of faults.py: for each fault a fresh root, one operation under the fault in a
forked process, a check in another.

Nothing is mocked: killpoint.c lets system calls fail that touch what is below the root, and a check
is the next process that opens it.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import (
    CheckpointManager,
    Json,
    KeepLast,
    Options,
    StepNotFound,
    load,
    save,
    verify,
)
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert
from holdfast.coordination import HoldfastError
from holdfast.multihost import Solo

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_arm_below.argtypes = (
    ctypes.c_char_p,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_long,
    ctypes.c_int,
)
LIBRARY.killpoint_count.restype = ctypes.c_long
HANG_S = 15.0  # an operation takes some 20 ms
MOST_POINTS = 2000  # a save makes some 300 calls
NEW = 100  # what a new value of an old step adds to its number
OPTIONS = Options(save_timeout_s=5.0)


def state(number: int) -> dict[str, Any]:
    """Returns the state that stands for a number."""
    return {"a": np.arange(3000) + number, "b": {"c": np.full(7, number)}, "n": number}


def number_of(found: Any) -> int:
    """Returns the number that a restored state stands for; fails where it is not one state, bit for
    bit.
    """
    want = state(found["n"])
    assert np.array_equal(found["a"], want["a"]) and np.array_equal(
        found["b"]["c"], want["b"]["c"]
    ), "a state of two saves"
    return int(found["n"])


class Trial:
    """What one operation says while it runs: how each call ended, and what was acknowledged."""

    def __init__(self) -> None:
        self.calls: dict[str, str] = {}
        self.untyped: list[str] = []
        self.done: list[str] = []

    def call(self, name: str, work: Callable[[], Any]) -> Any:
        """Makes one call of the product; every error ends here, and one that is not of the tree is
        noted.
        """
        try:
            result = work()
        except HoldfastError as error:
            self.calls[name] = type(error).__name__
        except Exception as error:
            self.calls[name] = f"untyped {type(error).__name__}"
            self.untyped.append(f"{name}: {''.join(traceback.format_exception(error))}")
        else:
            self.calls[name] = "done"
            self.done.append(name)
            return result
        return None


def managed(
    trial: Trial, root: Path, work: Callable[[CheckpointManager], None], keep: int = 99
) -> None:
    """Opens the root, works, and once the work has ended in an error, with the store well again,
    saves another step.
    """
    manager = trial.call(
        "open",
        lambda: CheckpointManager(root, keep_policy=KeepLast(keep), group=Solo(), options=OPTIONS),
    )
    if manager is None:
        return
    before = len(trial.done)
    work(manager)
    if len(trial.done) == before:
        LIBRARY.killpoint_disarm()
        trial.call("goes on", lambda: saved(manager, 8, state(8)))
    trial.call("close", manager.close)


def saved(manager: CheckpointManager, step: int, value: Any, overwrite: bool = False) -> None:
    manager.save(step, items={"state": value, "facts": Json({"step": step})}, overwrite=overwrite)
    manager.wait_until_finished()


def run_save(trial: Trial, root: Path) -> None:
    managed(
        trial, root, lambda manager: trial.call("save", lambda: saved(manager, 3, state(3))), keep=2
    )


def run_overwrite(trial: Trial, root: Path) -> None:
    managed(
        trial,
        root,
        lambda manager: trial.call(
            "save", lambda: saved(manager, 2, state(2 + NEW), overwrite=True)
        ),
    )


def run_delete(trial: Trial, root: Path) -> None:
    managed(trial, root, lambda manager: trial.call("delete", lambda: manager.delete(1)))


def run_convert(trial: Trial, root: Path) -> None:
    source = open_checkpoint(root.parent / "source")
    trial.call("save", lambda: convert(source, StorePath(open_storage(root)), "holdfast"))


def run_oneshot(trial: Trial, root: Path) -> None:
    trial.call("save", lambda: save(root, state(3), step=3, group=Solo(), timeout_s=5.0))


def run_oneshot_overwrite(trial: Trial, root: Path) -> None:
    trial.call(
        "save",
        lambda: save(root, state(2 + NEW), step=2, overwrite=True, group=Solo(), timeout_s=5.0),
    )


def make_root(root: Path) -> None:
    with CheckpointManager(root, group=Solo()) as manager:
        for step in (1, 2):
            saved(manager, step, state(step))


def make_source(root: Path) -> None:
    make_root(root)
    save(root.parent / "source", state(3), step=3, group=Solo())


def make_checkpoint(root: Path) -> None:
    save(root, state(2), step=2, group=Solo())


def allowed(operation: str, trial: dict[str, Any]) -> dict[int, set[int | None]]:
    """Returns, for each step, the numbers that may be there after a trial; None stands for a step
    that is not there.
    """
    done = set(trial["done"])
    new = 2 + NEW
    after: dict[int, set[int | None]] = {1: {1}, 2: {2}}
    if operation in ("save", "convert"):
        after[3] = {3} if "save" in done else {3, None}
        if operation == "save":
            after[1] = {1, None}
    if operation == "overwrite":
        after[2] = {new} if "save" in done else {2, new}
    if (
        operation == "delete"
        # a store that finds nothing any more, its own listings included, cannot say that a step is
        # still there
    ):
        finds_nothing = trial["error"] == errno.ENOENT and trial["times"] > 2
        after[1] = {None} if "delete" in done and not finds_nothing else {1, None}
    if "goes on" in trial["calls"]:
        after[8] = {8} if "goes on" in done else {8, None}
        if operation == "save":  # which keeps two
            after[2] = {2} if "goes on" not in done else {2, None}
    return after


def check_root(root: Path, operation: str, trial: dict[str, Any]) -> dict[str, Any]:
    """Opens the root as the next attempt would: what is listed is exact, what was acknowledged is
    there, the next save works.
    """
    with CheckpointManager(root, group=Solo()) as manager:
        manager._state.worker.wait()
        found: dict[int, int | None] = {}
        for step in manager.all_steps():
            verify(root / str(step))
            found[step] = number_of(manager.restore(step))
            if step != 3 or operation != "convert":
                assert manager.restore(step, item="facts") == {"step": step}
        for step, numbers in allowed(operation, trial).items():
            assert found.pop(step, None) in numbers, f"step {step} has to hold one of {numbers}"
        assert not found, f"unknown steps {found}"
        saved(manager, 9, state(9))
        steps = manager.all_steps()
    return {
        "steps": steps,
        "left": left_in(root, [(f"{step}/", root / str(step)) for step in steps]),
    }


def check_folder(root: Path, operation: str, trial: dict[str, Any]) -> dict[str, Any]:
    """Does the same for a checkpoint by itself."""
    old, new, done = (
        (2, 2 + NEW, "save" in trial["done"])
        if operation == "oneshot overwrite"
        else (None, 3, "save" in trial["done"])
    )
    try:
        verify(root)
        found: int | None = number_of(load(root))
    except StepNotFound:
        found = None
    assert found in ({new} if done else {old, new}), f"the folder holds {found}"
    save(root, state(9), step=9, overwrite=True, group=Solo())
    assert number_of(load(root)) == 9
    return {"steps": [found], "left": left_in(root, [("", root)])}


def left_in(root: Path, folders: list[tuple[str, Path]]) -> list[str]:
    """Returns the files below a root that no record names."""
    named = set()
    for prefix, folder in folders:
        record = json.loads((folder / "checkpoint.json").read_bytes())
        named |= {
            f"{prefix}{name}" for item in record["items"].values() for name, *_ in item["files"]
        } | {f"{prefix}checkpoint.json"}
    return sorted(
        {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - named
    )


@dataclass(frozen=True)
class Operation:
    """What is done before the fault, under it, and by the process that comes after."""

    make: Callable[[Path], None]
    run: Callable[[Trial, Path], None]
    check: Callable[[Path, str, dict[str, Any]], dict[str, Any]]


OPERATIONS = {
    "save": Operation(make_root, run_save, check_root),
    "overwrite": Operation(make_root, run_overwrite, check_root),
    "delete": Operation(make_root, run_delete, check_root),
    "convert": Operation(make_source, run_convert, check_root),
    "oneshot": Operation(lambda root: root.mkdir(), run_oneshot, check_folder),
    "oneshot overwrite": Operation(make_checkpoint, run_oneshot_overwrite, check_folder),
}


def in_child(work: Callable[[], Any]) -> tuple[Any, str]:
    """Runs `work` in a forked process; returns its result, or None and what went wrong there
    ("hang" and all stacks).
    """
    read, write = os.pipe()
    with open(os.memfd_create("stacks"), "w+b", buffering=0) as stacks:
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.dump_traceback_later(HANG_S, exit=True, file=stacks)
                os.write(write, json.dumps(work()).encode())
            except BaseException:
                stacks.write(traceback.format_exc().encode())
                os._exit(3)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as stream:
            said = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        stacks.seek(0)
        wrong = stacks.read().decode(errors="replace")
    if code == 0:
        return json.loads(said), ""
    return None, {1: "hang\n", 3: ""}.get(code, f"ended with {code}\n") + wrong


def run_trial(
    operation: Operation, root: Path, point: int, error: int, times: int, after: bool
) -> dict[str, Any]:
    trial = Trial()
    where = os.memfd_create("where")
    faulthandler.register(signal.SIGUSR1, file=where, all_threads=False)
    LIBRARY.killpoint_signal(signal.SIGUSR1)
    LIBRARY.killpoint_arm_below(os.fsencode(root), point, error, times, after)
    operation.run(trial, root)
    reached = LIBRARY.killpoint_count() > point
    LIBRARY.killpoint_disarm()
    stack = os.pread(where, 1 << 20, 0).decode()
    said = {
        "point": point,
        "error": error,
        "times": times,
        "after": after,
        "reached": reached,
        "stack": stack,
    }
    return said | {"calls": trial.calls, "done": trial.done, "untyped": trial.untyped}


def inject(
    operation: Operation, name: str, root: Path, point: int, error: int, times: int, after: bool
) -> dict[str, Any]:
    """Does one trial and its check; `wrong` says what was lost, unreadable or hung, `left` what no
    record names.
    """
    trial, wrong = in_child(lambda: run_trial(operation, root, point, error, times, after))
    if trial is None:
        return {
            "point": point,
            "wrong": wrong,
            "untyped": [],
            "left": [],
            "calls": {},
            "reached": True,
        }
    found, wrong = in_child(lambda: operation.check(root, name, trial))
    if wrong:
        wrong += f"the fault was in\n{trial['stack']}"
    return trial | {"wrong": wrong, "left": found["left"] if found is not None else []}


def main() -> None:
    logging.disable(logging.ERROR)
    assert threading.active_count() == 1, "only what has no threads may fork"
    scratch = Path(sys.argv[1])
    name = sys.argv[2]
    first = int(sys.argv[3])
    every = int(sys.argv[4])
    operation = OPERATIONS[name]
    template = scratch / "template"
    _, wrong = in_child(lambda: operation.make(template))
    assert not wrong, wrong
    root = scratch / "root"
    for error, times, after in json.loads(sys.argv[5]):
        point = first
        reached = True
        while reached:
            assert point < MOST_POINTS, "the walk did not come to the end of the operation"
            shutil.copytree(template, root)
            said = inject(operation, name, root, point, error, times, after)
            print(json.dumps(said), flush=True)
            shutil.rmtree(root)
            point = point + every
            reached = said["reached"]


main()

"""The job of test_fork_saves.py: forks a child in every phase of a save, as a DataLoader does,
while killpoint.c holds the save there.

A child has to end at once, whatever it does with the manager that it inherits, and the parent must
not notice it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, KeepLast, load, save, verify
from holdfast.multihost import Solo

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_hold.argtypes = (ctypes.c_char_p, ctypes.c_long)
LIBRARY.killpoint_held.argtypes = (ctypes.c_double,)
CHILD_S = 10.0  # of a child's end, which takes some milliseconds
OWN_LOOK_S = 2.0  # of a save's caller at the root: it takes milliseconds, unless it is held
HANG_S = 60.0
PHASES = (
    "manager.py",
    "lanes.py",
    "async_saver.py",
    "stager.py",
    "snapshot.py",
    "planner.py",
    "scheduler.py",
)


def state(step: int) -> dict[str, Any]:
    return {"a": np.arange(5000) + step, "n": step}


def check(found: Any, step: int) -> None:
    assert found["n"] == step and np.array_equal(found["a"], state(step)["a"]), (step, found)


def end_tidily(manager: CheckpointManager | None) -> None:
    """Does what a child may do with a manager that it has inherited: none of it is an act upon the
    root.
    """
    if manager is not None:
        with pytest.raises(ValueError, match="forked"):
            manager.save(1 << 20, state(0))
        manager.close()
    gc.collect()


def end_at_once(manager: CheckpointManager | None) -> None:
    """Ends as a worker of multiprocessing does that has not heard of managers."""


End: TypeAlias = Callable[[CheckpointManager | None], None]
ENDS: tuple[End, ...] = (end_tidily, end_at_once)


def ends_at_once(pid: int) -> None:
    """Waits for a child; one that does not end is killed, and fails the job."""
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, (
                f"the child ended with {os.waitstatus_to_exitcode(status)}"
            )
            return
        time.sleep(0.001)
    os.kill(pid, signal.SIGABRT)  # faulthandler shows where it stands
    os.waitpid(pid, 0)
    raise AssertionError("the child did not end")


def fork(end: End, manager: CheckpointManager | None = None) -> None:
    """Forks a child that ends in this way, and waits for it.

    By os._exit, as multiprocessing ends its workers: to finalize an interpreter that was forked
    beside other threads is not ours to mend.
    """
    pid = os.fork()
    if pid == 0:
        sys.settrace(None)
        try:
            end(manager)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    ends_at_once(pid)


def forks_while_it_saves(root: Path, every: int) -> int:
    """Forks at every system call that the save's threads make below the root, while the thread that
    makes it stands still there.
    """
    with CheckpointManager(root, keep_policy=KeepLast(2), group=Solo()) as manager:
        for step in itertools.count(1):
            LIBRARY.killpoint_hold(os.fsencode(root), (step - 1) * every)
            # What the caller's own look at the root has other threads read is no save's call.
            let_go = threading.Timer(OWN_LOOK_S, LIBRARY.killpoint_release)
            let_go.start()
            manager.save(step, state(step))
            is_own = let_go.finished.is_set()
            let_go.cancel()
            if is_own:
                LIBRARY.killpoint_held(0.0)
            held = False
            while not held and (
                manager.is_saving_in_progress() or not manager._state.worker.wait(0)
            ):
                held = bool(LIBRARY.killpoint_held(0.01))
            if held:
                for end in ENDS:
                    fork(end, manager)
                LIBRARY.killpoint_release()
            manager.wait_until_finished(HANG_S / 2)
            manager._state.worker.wait()
            LIBRARY.killpoint_disarm()
            check(manager.restore(step), step)
            assert manager.all_steps() == [step - 1, step][-step:], manager.all_steps()
            if not held and not is_own:
                return step
    raise AssertionError


class _ForkAtLine:
    """Forks in the main thread at the nth line that it runs of a save's beginning, in the middle of
    whatever it holds there.
    """

    def __init__(self, line: int, end: End, manager: CheckpointManager) -> None:
        self._remaining = line
        self._end = end
        self._manager = manager
        self.reached = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(PHASES) or "holdfast" not in frame.f_globals.get(
            "__name__", ""
        ):
            return None
        if event == "line" and not self.reached:
            self._remaining -= 1
            if self._remaining < 0:
                self.reached = True
                fork(self._end, self._manager)
        return self


def forks_while_it_begins(root: Path, every: int) -> int:
    """Forks at every line of `save` in the caller's thread."""
    with CheckpointManager(root, keep_policy=KeepLast(2), group=Solo()) as manager:
        for step in itertools.count(1):
            at_line = _ForkAtLine((step - 1) * every, ENDS[step % len(ENDS)], manager)
            sys.settrace(at_line)
            try:
                manager.save(step, state(step))
            finally:
                sys.settrace(None)
            manager.wait_until_finished(HANG_S / 2)
            check(manager.restore(step), step)
            if not at_line.reached:
                return step
    raise AssertionError


def forks_beside_one_shots(root: Path, every: int) -> int:
    """Forks at every system call of a one-shot save that another thread makes, an overwrite of the
    one before.
    """
    failed: list[BaseException] = []

    def saves(number: int) -> None:
        try:
            save(root, state(number), step=number, overwrite=True, group=Solo())
        except BaseException as error:
            failed.append(error)

    for number in itertools.count():
        LIBRARY.killpoint_hold(os.fsencode(root), number * every)
        thread = threading.Thread(target=saves, args=(number,))
        thread.start()
        held = False
        while not held and thread.is_alive():
            held = bool(LIBRARY.killpoint_held(0.01))
        if held:
            for end in ENDS:
                fork(end)
            LIBRARY.killpoint_release()
        thread.join(HANG_S / 2)
        LIBRARY.killpoint_disarm()
        assert not failed, failed
        check(load(root), number)
        verify(root)
        if not held:
            return number
    raise AssertionError


WAYS = {
    "saving": forks_while_it_saves,
    "beginning": forks_while_it_begins,
    "oneshot": forks_beside_one_shots,
}


def main() -> None:
    logging.disable(logging.ERROR)
    faulthandler.enable()
    warnings.filterwarnings(
        "ignore", message=".*fork.*"
    )  # what Python says of every fork beside threads
    phases = WAYS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(phases))


if __name__ == "__main__":
    main()

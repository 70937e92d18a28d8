"""The job of test_interrupts.py: saves on and on, each interrupted by a SIGINT at a random moment,
and looks at what is there.

A child process sends the signals, so that they come from outside, as Ctrl-C does. The handler
raises KeyboardInterrupt only while the product is at work: what this file notes down is not what is
under test.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import (
    CheckpointManager,
    KeepLast,
    StepExists,
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

TRIES = 8
HANG_S = 20.0  # of one save, which takes some milliseconds
ENDS: Counter[str] = Counter()


def state(number: int) -> dict[str, Any]:
    return {"a": np.arange(5000) + number, "b": [np.full(9, number)], "n": number}


def check(found: Any, number: int) -> None:
    want = state(number)
    assert (
        found["n"] == number
        and np.array_equal(found["a"], want["a"])
        and np.array_equal(found["b"][0], want["b"][0])
    ), (number, found)


class Interrupter:
    """A process that sends a SIGINT after as long as it is told, and says when it has."""

    def __init__(self) -> None:
        self._armed = False
        told, tell = os.pipe()
        hear, say = os.pipe()
        parent = os.getpid()
        if os.fork() == 0:
            os.close(tell)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for line in os.fdopen(told):
                time.sleep(float(line))
                os.kill(parent, signal.SIGINT)
                os.write(say, b".")
            os._exit(0)
        os.close(told)
        os.close(say)
        self._tell = tell
        self._hear = hear
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def run(self, work: Callable[[], None], delay_s: float) -> str:
        """Does the work and interrupts it after `delay_s`; returns how it ended: "done",
        "interrupted", or the typed error's name.
        """
        os.write(self._tell, f"{delay_s}\n".encode())
        end = "interrupted"
        try:
            try:
                self._armed = True
                work()
                end = "done"
            except HoldfastError as error:
                end = type(error).__name__
            finally:
                self._armed = False
        except KeyboardInterrupt:
            self._armed = False
        assert os.read(self._hear, 1) == b"."
        ENDS[end] += 1
        return end


def delays(rng: random.Random, work: Callable[[int], None], first: int = 0) -> Callable[[], float]:
    """Returns what draws a delay within the time that the work takes; for that it is done, as
    `first` and those that follow.
    """
    times = []
    for number in range(first, first + TRIES):
        began = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - began)
    longest = sorted(times)[TRIES // 4]  # the first ones are slow
    return lambda: rng.uniform(0, longest)


def manager_saves(root: Path, saves: int, rng: random.Random, interrupter: Interrupter) -> None:
    """One manager: each save and the wait for it are interrupted; the wait that follows ends, and
    the next save is there.
    """
    with CheckpointManager(root, keep_policy=KeepLast(3), group=Solo()) as manager:

        def one(step: int) -> None:
            manager.save(step, state(step))
            manager.wait_until_finished()

        delay = delays(rng, one)
        for step in range(TRIES, TRIES + 2 * saves, 2):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            end = interrupter.run(lambda step=step: one(step), delay())
            manager.wait_until_finished(HANG_S / 2)
            if end == "done" or step in manager.all_steps():
                check(manager.restore(step), step)
            one(step + 1)
            assert manager.all_steps()[-1] == step + 1 and len(manager.all_steps()) == 3, (
                manager.all_steps()
            )
            check(manager.restore(step + 1), step + 1)


def managers(root: Path, saves: int, rng: random.Random, interrupter: Interrupter) -> None:
    """Each save has a manager of its own, which is interrupted from its opening to its end."""

    def one(step: int, acknowledged: list[int] | None = None) -> None:
        with CheckpointManager(root, keep_policy=KeepLast(3), group=Solo()) as manager:
            manager.save(step, state(step))
            manager.wait_until_finished()
            if acknowledged is not None:
                acknowledged.append(step)

    delay = delays(rng, one)
    for step in range(TRIES, TRIES + 2 * saves, 2):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        acknowledged: list[int] = []
        interrupter.run(
            lambda step=step, acknowledged=acknowledged: one(step, acknowledged), delay()
        )
        with CheckpointManager(root, keep_policy=KeepLast(3), group=Solo()) as manager:
            steps = manager.all_steps()
            assert set(acknowledged) | {step - 1} <= set(steps), (steps, acknowledged)
            for there in steps:
                check(manager.restore(there), there)
            manager.save(step + 1, state(step + 1))
            manager.wait_until_finished()


def one_shots(root: Path, saves: int, rng: random.Random, interrupter: Interrupter) -> None:
    """Each is interrupted: the first of a folder leaves none or all of it, an overwrite the old or
    the new.
    """
    delay = delays(rng, lambda number: save(root / f"try{number}", state(number), group=Solo()))
    for number in range(saves):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        folder = root / str(number // 4)
        there = number - 1
        overwrite = number % 4 > 0
        end = interrupter.run(
            functools.partial(save, folder, state(number), overwrite=overwrite, group=Solo()),
            delay(),
        )
        try:
            found = load(folder)
        except StepNotFound:
            assert not overwrite and end != "done", (number, end)
        else:
            check(
                found, number if end == "done" or found["n"] == number or not overwrite else there
            )
            verify(folder)
        save(folder, state(number), overwrite=True, group=Solo())


def conversions(root: Path, saves: int, rng: random.Random, interrupter: Interrupter) -> None:
    """Each is interrupted: the step is there, whole, or the next conversion makes it."""
    for number in range(4):
        save(root / f"source{number}", state(number), step=number, group=Solo())

    def one(number: int) -> None:
        convert(
            open_checkpoint(root / f"source{number % 4}"),
            StorePath(open_storage(root / f"to{number // 4}")),
            "holdfast",
        )

    delay = delays(rng, one, 4 * saves)
    for number in range(saves):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        there = root / f"to{number // 4}" / str(number % 4)
        end = interrupter.run(lambda number=number: one(number), delay())
        if end == "done" or (there / "checkpoint.json").exists():
            check(load(there), number % 4)
            verify(there)
        try:
            one(number)
        except StepExists:
            assert (there / "checkpoint.json").exists()
        check(load(there), number % 4)


WAYS = {
    "manager": manager_saves,
    "managers": managers,
    "oneshot": one_shots,
    "convert": conversions,
}


def main() -> None:
    logging.disable(logging.ERROR)
    way = sys.argv[1]
    root = Path(sys.argv[2])
    saves = int(sys.argv[3])
    seed = sys.argv[4]
    WAYS[way](root, saves, random.Random(f"{way} {seed}"), Interrupter())
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(ENDS))


if __name__ == "__main__":
    main()

"""Ctrl-C in a real terminal: one has the job save and leave, a second one ends it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointManager, Options
from tests.support.paths import program

HOLDFAST = Path(sys.executable).parent / "holdfast"
_CTRL_C = b"\x03"


class Terminal:
    """A command in a terminal of its own: its output, and keys that are pressed."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self.output = ""

    def _read(self, deadline_s: float) -> bool:
        """Reads what comes next; returns whether the terminal is still open."""
        remaining_s = deadline_s - time.monotonic()
        readable = select.select([self._descriptor], [], [], max(0.0, remaining_s))[0]
        assert readable, f"too late: {self.output}"
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:
            data = b""  # so Linux says that nobody has it open any more
        self.output += data.decode()
        return bool(data)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Waits until the output has a text so often."""
        deadline_s = time.monotonic() + 90
        while self.output.count(text) < times:
            assert self._read(deadline_s), self.output

    def press_ctrl_c(self) -> None:
        """The kernel makes a SIGINT of it, for all in the foreground."""
        os.write(self._descriptor, _CTRL_C)

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        deadline_s = time.monotonic() + 60
        while self._read(deadline_s):
            pass
        return self._process.wait(60)


@contextmanager
def _terminal(*command: object) -> Iterator[Terminal]:
    descriptor, own = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", HOLDFAST, *map(str, command)],
        stdin=own,
        stdout=own,
        stderr=own,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    os.close(own)
    try:
        yield Terminal(process, descriptor)
    finally:
        os.close(descriptor)  # a launcher that still runs gets SIGHUP, and ends its processes


def _trainer(root: Path, way: str) -> list[object]:
    own = [sys.executable, program("ctrl_c_trainer"), root, way]
    return ["run", "-n", 2, "--no-view", "--", *own]


def test_one_saves_and_leaves(tmp_path: Path) -> None:
    """As the message says: the step at which all stopped is there."""
    with _terminal(*_trainer(tmp_path / "run", "asks")) as terminal:
        terminal.wait_for("it goes", times=2)
        terminal.press_ctrl_c()
        terminal.wait_for(
            "asked to stop by SIGINT, Ctrl-C again ends them at once: 2 of 2 processes have 120 s"
            " to save and leave"
        )
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.output
    assert "preemption notice: Ctrl-C" in terminal.output
    assert "SIGTERM" not in terminal.output and "does not ask" not in terminal.output
    with CheckpointManager(tmp_path / "run", options=Options(read_only=True)) as manager:
        assert len(manager.all_steps()) == 1


@pytest.mark.slow
def test_a_second_one_ends(tmp_path: Path) -> None:
    """A program that never asks whether it is to stop, long before its two minutes are over. One
    step is saved for the first one, and the launcher says why the program goes on.
    """
    with _terminal(*_trainer(tmp_path / "run", "deaf")) as terminal:
        terminal.wait_for("it goes", times=2)
        terminal.press_ctrl_c()
        terminal.wait_for(
            "processes 0, 1: the loop does not ask reached_preemption(step): it goes on until"
            " --preemption-grace-s"
        )
        terminal.press_ctrl_c()
        assert terminal.wait() == 130
    assert terminal.output.count("saves a step") == 2, terminal.output
    with CheckpointManager(tmp_path / "run", options=Options(read_only=True)) as manager:
        assert len(manager.all_steps()) == 1

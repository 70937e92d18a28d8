"""The live view: coloured lines above a table of the processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.launch import LiveView
from holdfast.launch.supervisor.job import Job, State
from holdfast.proto import session_pb2

HOLDFAST = Path(sys.executable).parent / "holdfast"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_the_live_view_on_a_terminal() -> None:
    """Below the coloured lines stands a table with each process's state; on the terminal of a real
    pty.
    """
    ours, theirs = os.openpty()
    script = "import sys; print('hello'); sys.exit(0)"
    popen = subprocess.Popen(
        [HOLDFAST, "run", "-n", "2", "--", *python(script)],
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    assert popen.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "[0] hello" in text and "[1] hello" in text
    assert re.search(r"process +state +step +steps/s +saved", text)
    assert re.search(r"local-\w+: (running|finished), attempt 1", text)
    assert b"\x1b[36m[0] " in seen


def report(step: int, saved: int, rate: float) -> session_pb2.TaskStatus:
    """Returns what process 0 reports."""
    progress = session_pb2.ReportRequest(step=step, saved_step=saved)
    return session_pb2.TaskStatus(progress=progress, steps_per_second=rate)


def test_the_table_tells_step_rate_and_last_save() -> None:
    """The rate is the coordinator's, so that the view says what status and page say."""
    now = [100.0]
    view = LiveView(io.StringIO(), io.StringIO(), 2, clock=lambda: now[0])
    job = Job("j", 2, 2, state=State.RUNNING, attempt=3, alive=frozenset({0, 1}), saved_step=40)
    view.observe(job)
    shown = []
    for step in (50, 60, 70):
        progress = (report(step, 40, 4.96),)
        view.follow(lambda progress=progress: progress)
        title, table = view.frame().renderables
        now[0] += 2
        shown.append([list(column.cells) for column in table.columns])
    assert str(title) == "j: running, attempt 3, step 40 saved 4 s ago"
    assert shown[-1] == [["0", "1"], ["running", "running"], ["70", "-"], ["5", "-"], ["40", "-"]]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_frame_is_readable_at_any_width(columns: int) -> None:
    """The job's line is one line, and no column is lost."""
    view = LiveView(io.StringIO(), io.StringIO(), 2)
    alive = frozenset({0, 1})
    job = Job("local-4f2a81bc", 2, 2, state=State.RUNNING, attempt=3, alive=alive, saved_step=3456)
    view.observe(job)
    view.follow(lambda: (report(123460, 3456, 1234.5),))
    console = Console(file=io.StringIO(), width=columns)
    console.print(view.frame())
    line, titles, first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.rstrip() == "local-4f2a81bc: running, attempt 3, step 3456 saved 0 s ago"
    assert titles.split() == ["process", "state", "step", "steps/s", "saved"]
    assert first.split() == ["0", "running", "123460", "1234", "3456"]
    assert second.split() == ["1", "running", "-", "-", "-"]

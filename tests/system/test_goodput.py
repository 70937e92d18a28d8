"""Goodput of real jobs against a stopwatch: one that works, one that hangs, one that is starved."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.launch import JobResult, RunSettings, run_local
from tests.support.paths import program

NEAR_S = 2.5  # the launcher looks twice a second, and two cores are shared


def run(folder: Path, steps_s: float, hang_s: float, **settings: Path) -> tuple[JobResult, float]:
    """Runs a job of two processes; returns how it ended, and how long that took by the clock."""
    script = str(program("goodput_steps"))
    marks = str(folder / "marks.json")
    command = [sys.executable, script, marks, str(steps_s), str(hang_s)]
    began = time.monotonic()
    result = run_local(command, 2, RunSettings(**settings))
    return result, time.monotonic() - began


def stretches(folder: Path) -> list[float]:
    """Returns how long the program stepped and hung, by its own clock."""
    began, stepped, ended = json.loads((folder / "marks.json").read_text())
    return [stepped - began, ended - stepped]


@pytest.mark.slow
def test_a_job_that_works(tmp_path: Path) -> None:
    """Its steps are what its own clock said, and the parts are the whole."""
    result, elapsed_s = run(tmp_path, 8.0, 0.0)
    goodput = result.goodput
    print(f"\nstopwatch {elapsed_s:.1f} s, {stretches(tmp_path)}: {goodput}")
    assert result.outcome == "done"
    assert goodput.total_s == pytest.approx(result.elapsed_s, abs=0.1)
    assert goodput.total_s == pytest.approx(elapsed_s, abs=NEAR_S)
    assert goodput.stepping_s == pytest.approx(stretches(tmp_path)[0], abs=NEAR_S)
    assert goodput.hung_s == 0.0 and goodput.waiting_s == 0.0


@pytest.mark.slow
def test_a_job_that_hangs(tmp_path: Path) -> None:
    """The time from a step to a late one is hung, and no progress."""
    result, _ = run(tmp_path, 6.0, 25.0)
    goodput = result.goodput
    stepped_s, hung_s = stretches(tmp_path)
    print(f"\nstopwatch: steps {stepped_s:.1f} s, hang {hung_s:.1f} s: {goodput}")
    assert goodput.total_s == pytest.approx(result.elapsed_s, abs=0.1)
    assert goodput.hung_s == pytest.approx(hung_s, abs=NEAR_S)
    assert goodput.stepping_s == pytest.approx(stepped_s, abs=NEAR_S)


@pytest.mark.slow
def test_a_job_that_is_starved(tmp_path: Path) -> None:
    """Until there is room for both processes it waits for machines."""
    capacity = tmp_path / "capacity"
    capacity.write_text("1")
    timer = threading.Timer(8.0, capacity.write_text, ["2"])
    timer.start()
    result, _ = run(tmp_path, 3.0, 0.0, capacity_file=capacity)
    timer.join()
    goodput = result.goodput
    print(f"\nstopwatch: starved 8.0 s: {goodput}")
    assert result.outcome == "done"
    assert goodput.waiting_s == pytest.approx(8.0, abs=NEAR_S)
    assert goodput.total_s == pytest.approx(result.elapsed_s, abs=0.1)

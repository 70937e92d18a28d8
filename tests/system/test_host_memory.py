"""The processes of one machine, or of one cgroup, divide its memory."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import memory_cgroup
from tests.support.checkpointing import run_together, together
from tests.support.paths import program

HOST_MEMORY = program("host_memory")
ROUNDS = 10
SHARE = 0.3  # of the state, that is free beside it
UNBOUNDED = 1 << 40  # as if each process were alone


def arguments(
    tmp_path: Path, cgroup: Path | str, *, rounds: int = ROUNDS, bound: int = 0
) -> list[object]:
    """Returns what the program is told: where to save, in which cgroup, how often."""
    return [tmp_path / "root", tmp_path / "hosts", cgroup, rounds, SHARE, bound]


def report_of(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.findall(r"^report (.*)", output, re.MULTILINE)[0])
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_lives_in_its_cgroup(tmp_path: Path) -> None:
    """Four processes have room for 0.3 of their state beside it: they save durably and locally,
    and restore both, ten times; nobody is killed.
    """
    with memory_cgroup("holdfast-lives") as folder:
        outputs = run_together(HOST_MEMORY, 4, *arguments(tmp_path, folder), timeout_s=500)
    for output in outputs:
        report = report_of(output)
        assert min(report["saves"], report["local_saves"]) >= ROUNDS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_budget_it_is_killed(tmp_path: Path) -> None:
    """What each process takes as if it were alone is more than there is."""
    with (
        memory_cgroup("holdfast-dies") as folder,
        together(HOST_MEMORY, 4, *arguments(tmp_path, folder, bound=UNBOUNDED)) as processes,
    ):
        end = time.monotonic() + 200
        while not (died := [each.poll() for each in processes.popens if each.poll()]):
            assert time.monotonic() < end, [processes.output(index) for index in range(4)]
            time.sleep(0.1)
    assert -signal.SIGKILL in died


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_processes_of_a_machine_stay_within_what_it_has(tmp_path: Path) -> None:
    """Without a cgroup the machine's memory is divided: the peaks together are within it."""
    outputs = run_together(HOST_MEMORY, 8, *arguments(tmp_path, "none", rounds=1), timeout_s=250)
    reports = [report_of(output) for output in outputs]
    assert sum(report["peak"] for report in reports) <= min(report["free"] for report in reports)

"""The stacks of a process that hangs, as the others and `holdfast status` find them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from holdfast.coordination import CoordinationService
from tests.support.cluster import Processes, free_port
from tests.support.paths import program


@pytest.mark.slow
def test_the_stacks_stay_with_the_coordinator() -> None:
    """A process that ends in a hang has left its stacks, and why, where the others and `holdfast
    status` find them.
    """
    address = f"127.0.0.1:{free_port()}"
    script = program("watchdog_stacks_stay_with_coordinator")
    with Processes(script, 2, arguments=[address]) as processes:
        processes.wait_for(0, "stacks")
        found = json.loads(
            next(line for line in processes.output(0).splitlines() if line.startswith("{"))
        )
        processes.popens[1].wait(60)
    assert "no progress for" in found["why"] and "time.sleep(100)" in found["stacks"]
    assert processes.popens[1].returncode == 124


def test_every_log_says_why_the_job_hangs() -> None:
    """Without a launcher, too: who is elsewhere, on which host and at which line, in one sentence
    that is the same for all.
    """
    script = program("watchdog_log_every_process_says")
    with CoordinationService.spawn(3, recoverable=True, survivable=True) as service:
        with Processes(script, 3, arguments=[service.address]) as processes:
            said = set()
            for index in range(3):
                processes.wait_for(index, "why the job hangs")
                said.add(
                    processes.output(index).partition("why the job hangs: ")[2].splitlines()[0]
                )
    assert len(said) <= 2, said  # of two, where a minute ended in between
    for line in said:
        assert line.startswith(
            f"process 2 (host {socket.gethostname()}) is in load_batch, {script.name}:16"
        ), line
        assert (
            f"; the other 2 wait in sync_global_processes at <module>, {script.name}:21" in line
        ), line


def test_status_shows_stacks_of_living_and_dead() -> None:
    """`holdfast status --stacks` asks each living process where its threads are, and shows the
    report of one that its watchdog ended.
    """
    script = program("watchdog_status_shows_stacks_living")
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        with Processes(script, 2, arguments=[service.address]) as processes:
            processes.wait_for(0, "waiting")
            assert processes.popens[1].wait(60) == 124
            command = [
                sys.executable,
                "-c",
                "from holdfast.cli import main; main()",
                "status",
                service.address,
                "--stacks",
            ]
            shown = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=60
            ).stdout
    living, dead = shown.split("--- process 1\n")
    found, living = living.split("--- process 0\n")
    assert found.startswith("process 1 (host ") and ") has failed: hang: no progress for " in found
    assert "the_innocent_function" in living
    assert "Left by its watchdog: no progress for" in dead and "the_guilty_function" in dead

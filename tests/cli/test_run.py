"""`holdfast run`: what it says at the end, for programs and for people, and where the job's time
went while it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.coordination import StatusClient
from tests.support.paths import program

RUN = [sys.executable, "-c", "from holdfast.cli import main; main()", "run"]
PARTS = {"starting_s", "restoring_s", "stepping_s", "saving_s", "redoing_s", "ending_s"}


def test_all_time_of_a_job_is_accounted_for(tmp_path: Path) -> None:
    """The status has the parts, which sum to the time so far; so has the JSON at the end, on stdout
    alone, within 1 % of the wall clock.
    """
    command = [
        *RUN,
        "-n",
        "2",
        "--json",
        "--max-restarts",
        "1",
        "--no-standby",
        "--grace-s",
        "1",
        "--",
    ]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, sys.executable, "-u", str(program("steps_reported")), str(tmp_path / "done")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        started = time.monotonic()
        address = job.stderr.readline().split()[-1]
        with StatusClient(address, wait_for_ready=True) as client:
            while (seconds := dict(client.status().goodput_s)).get("stepping_s", 0.0) < 1.0:
                time.sleep(0.05)
        so_far_s = sum(seconds.values())
        assert seconds.keys() == PARTS and 1.0 < so_far_s <= time.monotonic() - began
        shown = subprocess.run(
            [*RUN[:-1], "status", address], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert any(
            line.startswith("goodput ") and "starting " in line for line in shown.splitlines()
        ), shown
        (tmp_path / "done").touch()
        stdout, stderr = job.communicate(timeout=60)
    took_s = time.monotonic() - started
    ended = json.loads(stdout)
    assert (job.returncode, ended["outcome"], ended["exit_code"], ended["attempts"]) == (
        0,
        "done",
        0,
        2,
    ) and ended["step"] >= 12, stderr
    assert ended["error"] is None and ended["goodput"].keys() == PARTS
    assert (
        sum(ended["goodput"].values()) == pytest.approx(ended["elapsed_s"], rel=0.01)
        and ended["elapsed_s"] <= took_s
    )
    assert all(
        ended["goodput"][part] > 0 for part in ("starting_s", "stepping_s", "redoing_s", "ending_s")
    )


def test_people_read_where_the_time_went(tmp_path: Path) -> None:
    """One line on stderr, of a job that has reported steps; a program's failure is a sentence in
    the JSON.
    """
    (tmp_path / "done").touch()
    job = [sys.executable, str(program("steps_reported")), str(tmp_path / "done")]
    command = [*RUN, "-n", "1", "--max-restarts", "1", "--no-standby", "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stderr.splitlines()[-1].startswith("holdfast: goodput "), (
        done.stderr
    )
    failed = subprocess.run(
        [*RUN, "-n", "1", "--json", "--", *job],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ended = json.loads(failed.stdout)
    assert failed.returncode == 1 and ended["outcome"] == "failed"
    assert ended["error"] == "process 0 of 1 ended with exit code 1 in attempt 1"


def test_a_table_and_json_do_not_go_together() -> None:
    """One is for people."""
    refused = subprocess.run(
        [*RUN, "-n", "1", "--json", "--view", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode == 2 and "--json is for programs, --view for people" in refused.stderr

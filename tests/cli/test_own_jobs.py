"""The list of this user's jobs, where no single one can be meant."""

from __future__ import annotations

import os
import tempfile
import time

import click
import pytest
from click.testing import CliRunner

from holdfast.cli.own_jobs import job_of_logs, only_job
from holdfast.coordination.process.job_folder import JobFolder, LaunchedJob, RunningJob


@pytest.fixture(autouse=True)
def _here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that is too long would leave the files in /tmp.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))


@click.command()
def asked() -> None:
    """Asks for the one job."""
    job, _ = only_job(as_json=False)
    click.echo(job.address)


def _publish(job_id: str, attempt: int = 1) -> None:
    JobFolder.create().publish(RunningJob(job_id, attempt, f"{job_id}-{attempt}", os.getpid()))


def test_what_is_wrong_is_said_first_and_the_list_is_short() -> None:
    """Of dozens of jobs that have ended the last five are listed, the newest first, in the words of
    all views.
    """
    for number in range(70):
        launcher = {"state": "finished", "why": "all are done", "attempt": 1}
        ended_unix_s = time.time() - 100 + number
        LaunchedJob(
            f"job-{number:02}", 1, "", launcher, "a", ended_unix_s=ended_unix_s, exit_code=0
        ).leave()
    found = CliRunner().invoke(asked)
    assert found.exit_code == 3
    first, titles, *rows = found.output.splitlines()
    assert first.startswith("Error: no job of this user runs on this machine")
    assert "the last job job-69, attempt 1, ended 3" in first and "finished, exit code 0" in first
    assert titles.split()[0] == "job"
    jobs = [row.split()[0] for row in rows if row.startswith("job-")]
    assert jobs == ["job-69", "job-68", "job-67", "job-66", "job-65"]
    assert rows[-1] == "and 65 more jobs that ended within the hour: --json lists all"


def test_a_job_without_a_coordinator_is_a_job() -> None:
    """It waits for machines, or between two attempts: the launcher's word says which."""
    waiting = {
        "state": "scheduling",
        "waiting_for": "room for 0 of at least 1 process",
        "attempt": 1,
        "field_of_a_later_version": 1,
    }
    LaunchedJob("j", os.getpid(), "/logs", waiting, "").leave()
    found = CliRunner().invoke(asked)
    assert found.exit_code == 3
    sentence = (
        "job j has no coordinator now: waiting for machines: room for 0 of at least 1 process"
    )
    assert found.output.splitlines()[0] == f"Error: {sentence}"
    with pytest.raises(click.ClickException, match=sentence):
        job_of_logs("/logs")


def test_a_job_between_attempts_counts_beside_one_that_runs() -> None:
    """Neither is taken for the only one."""
    _publish("runs")
    for job_id, attempt in (("runs", 1), ("restarts", 2)):
        launcher = {"state": "restarting", "attempt": attempt}
        LaunchedJob(job_id, os.getpid(), "", launcher, "").leave()
    found = CliRunner().invoke(asked)
    assert found.exit_code == 2
    first, _, *rows = found.output.splitlines()
    assert first.startswith("Error: 2 jobs of this user run on this machine")
    assert [row.split()[:3] for row in rows if row.startswith("r")] == [
        ["runs", "1", "running"],
        ["restarts", "2", "restarting"],
    ]


def test_a_job_with_two_coordinators_is_one_job() -> None:
    """While processes outlive an attempt: the newest is the job."""
    _publish("j", 1)
    _publish("j", 2)
    LaunchedJob("j", os.getpid(), "/logs", {"state": "rejoining", "attempt": 2}, "j-1").leave()
    assert CliRunner().invoke(asked).output == "j-2\n"
    assert job_of_logs("/logs")[0].address == "j-2"

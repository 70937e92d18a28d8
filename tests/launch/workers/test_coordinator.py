"""The coordinator of an attempt."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from holdfast.coordination.process.job_folder import job_folders
from holdfast.launch.workers.coordinator import Coordinator
from holdfast.multihost import StartupFailed
from tests.support.cluster import Processes, run_processes
from tests.support.paths import program
from tests.support.processes import runs, wait_until_ended


def test_a_coordinator_ends_when_it_is_closed() -> None:
    """Its address is a socket unless a host is given; its folder goes with it."""
    for host, prefix in ((None, "unix:/"), ("127.0.0.1", "127.0.0.1:")):
        coordinator = Coordinator("j", 1, 1, host=host)
        assert coordinator.address.startswith(prefix) and runs(coordinator.pid)
        (folder,) = [
            each
            for each in job_folders()
            if (job := each.job()) is not None and job.pid == coordinator.pid
        ]
        coordinator.close()
        assert wait_until_ended([coordinator.pid]) and not folder.path.exists()


def test_a_coordinator_ends_with_who_started_it() -> None:
    """SIGKILL, at any moment after its start, leaves none behind; one that shall outlive its
    starter does.
    """
    script = program("coordinator_coordinator_ends_with_who")
    with Processes(script, 1) as processes:
        processes.wait_for(0, "pids")
        pid, outlives = map(int, processes.output(0).split()[1:])
        processes.kill(0)
        assert wait_until_ended([pid]) and runs(outlives)
        os.kill(outlives, signal.SIGTERM)


def test_a_runtime_that_ignores_its_children_hides_no_end() -> None:
    """Ray's core ignores SIGCHLD, unknown to Python: a job that fails there, and a coordinator that
    is killed, are known to.
    """
    (output,) = run_processes(program("children_ignored").read_text(), 1)
    assert "job failed 3\ncoordinator -9\n" in output


def test_a_coordinator_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    """An address that is not this machine's, no temporary folder, and one that is another's: a
    StartupFailed with the reason.
    """
    with pytest.raises(
        StartupFailed, match=r"(?s)the coordinator cannot start: .*cannot listen at 192\.0\.2\.1"
    ):
        Coordinator("j", 1, 1, host="192.0.2.1")
    monkeypatch.setattr(tempfile, "tempdir", str(short_path / "gone"))
    with pytest.raises(
        StartupFailed,
        match=(
            f"no temporary folder for the coordinator: {short_path}/gone/holdfast-.*set TMPDIR to a"
            " folder"
        ),
    ):
        Coordinator("j", 1, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (short_path / f"holdfast-{os.getuid()}").symlink_to("/")
    with pytest.raises(
        StartupFailed,
        match=r"expected a folder of user .*, found no folder of .*; remove it, or set TMPDIR",
    ):
        Coordinator("j", 1, 1)


def test_one_that_cannot_be_published_is_a_failed_start() -> None:
    """As one that waited for its attempt, and whose folder is gone since."""
    coordinator = Coordinator("j", 1, 1)
    try:
        shutil.rmtree(Path(coordinator.address.removeprefix("unix:")).parent)
        with pytest.raises(StartupFailed, match=r"the coordinator cannot start: .*No such file"):
            coordinator.publish()
    finally:
        coordinator.close()

"""What a page learns of a job that has no coordinator now: from its launcher's files."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli.launcher_word import launcher_word
from holdfast.coordination.process.job_folder import LaunchedJob


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the user's folder lie in a folder of this test."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def launched(pid: int, job_id: str = "../run 7") -> LaunchedJob:
    """Returns the word of a launcher that waits for machines."""
    launcher = {"state": "scheduling", "waiting_for": "room"}
    return LaunchedJob(job_id, pid, "/logs", launcher, "")


def test_a_launcher_that_lives_is_heard(here: Path) -> None:
    """With where its lines are; whatever the job is called, no file lies elsewhere."""
    launched(os.getpid()).leave()
    word = launcher_word("../run 7")
    assert word is not None and word.log_dir == Path("/logs")
    assert (word.launcher.state, word.launcher.waiting_for) == ("scheduling", "room")
    assert launcher_word("run 7") is None
    assert [path.parent.parent for path in here.rglob("launched-*")] == [here]


def test_a_launcher_that_died_says_nothing(here: Path) -> None:
    """Its last word is not how the job is now."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    launched(child.pid).leave()
    assert launcher_word("../run 7") is None
    launched(os.getpid(), "another").leave()
    assert len([*here.rglob("launched-*")]) == 1, "the next launcher removes what it has left"


def test_how_it_ended_stays(here: Path) -> None:
    """In the words of the launcher's states, with the reason, until the job runs again; the newest
    counts, and none for longer than an hour.
    """
    launcher = {"state": "finished", "why": "all 2 processes are done", "attempt": 2}
    ended = LaunchedJob(
        "j", os.getpid(), "/logs", launcher, "a", ended_unix_s=time.time(), exit_code=0
    )
    replace(ended, ended_unix_s=time.time() - 5, pid=3, launcher={"state": "failed"}).leave()
    ended.leave()
    word = launcher_word("j")
    assert word is not None and word.log_dir == Path("/logs")
    assert (word.launcher.state, word.launcher.attempt) == ("finished", 2)
    assert word.launcher.why == "all 2 processes are done"
    again = LaunchedJob("j", os.getpid(), "", {"state": "running"}, "b")
    again.leave()
    word = launcher_word("j")
    assert word is not None and word.launcher.state == "running"
    replace(ended, ended_unix_s=time.time() - 4000, pid=4).leave()
    again.leave()
    assert len([*here.rglob("launched-*")]) == 2, "for an hour"

"""What a page learns of a job that has no coordinator now: from its launcher's files."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.cli.launcher_word import launcher_word
from holdfast.coordination.process.job_folder import EndedJob, LaunchedJob


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the user's folder lie in a folder of this test."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def launched(pid: int, job_id: str = "../run 7") -> LaunchedJob:
    """Returns the word of a launcher that waits for machines."""
    return LaunchedJob(job_id, pid, "/logs", {"state": "scheduling", "waiting_for": "room"})


def test_a_launcher_that_lives_is_heard(here: Path) -> None:
    """With where its lines are; whatever the job is called, no file lies elsewhere."""
    launched(os.getpid()).leave()
    word = launcher_word("../run 7")
    assert word is not None and word.log_dir == Path("/logs")
    assert (word.launcher.state, word.launcher.waiting_for) == ("scheduling", "room")
    assert launcher_word("run 7") is None
    assert [path.parent.parent for path in here.rglob("launched-*")] == [here]
    launched(os.getpid()).remove()
    assert launcher_word("../run 7") is None


def test_a_launcher_that_died_says_nothing(here: Path) -> None:
    """Its last word is not how the job is now."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    launched(child.pid).leave()
    assert launcher_word("../run 7") is None
    launched(os.getpid(), "another").leave()
    assert len([*here.rglob("launched-*")]) == 1, "the next launcher removes what it has left"


def test_how_it_ended_stays(here: Path) -> None:
    """In the words of the launcher's states, with the reason."""
    ended = EndedJob(
        job_id="j", attempt=2, address="a", unix_s=time.time(), outcome="done", exit_code=0,
        reason="all 2 processes are done",
    )  # fmt: skip
    ended.leave()
    word = launcher_word("j")
    assert word is not None and word.log_dir is None
    assert (word.launcher.state, word.launcher.attempt) == ("done", 2)
    assert word.launcher.why == "all 2 processes are done"

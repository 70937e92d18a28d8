"""The folders in which a user's coordinators of this machine are found, and nobody else's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationError, mounts
from holdfast.coordination.process import job_folder
from holdfast.coordination.process.job_folder import (
    JobFolder,
    LaunchedJob,
    RunningJob,
    job_folders,
    launched_jobs,
    user_folder,
)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_published_job_is_found(base: Path) -> None:
    """Only its own user may enter the folder; nothing is found before it is published."""
    assert job_folders() == []
    folder = JobFolder.create()
    own = base / f"holdfast-{os.getuid()}"
    assert folder.path.parent.parent == own
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, own)] == [
        0o700,
        0o700,
    ]
    assert folder.job() is None
    folder.publish(job := RunningJob("train", 2, folder.socket, os.getpid()))
    (published,) = (each.job() for each in job_folders())
    assert published == job and published.runs
    folder.remove()
    assert job_folders() == []


def test_a_folder_that_goes_meanwhile_hides_no_other(base: Path) -> None:
    """The list is of those that are there."""
    living = JobFolder.create()
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for folder in [JobFolder.create() for _ in range(20)]:
                folder.remove()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all(living.path in {folder.path for folder in job_folders()} for _ in range(300))
    finally:
        done.set()
        thread.join()


def test_the_folders_of_the_dead_go(base: Path) -> None:
    """A launcher that was killed could not remove its own."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(30)
    dead = JobFolder.create()
    dead.publish(RunningJob("train", 1, dead.socket, ended.pid))
    assert not RunningJob("train", 1, dead.socket, ended.pid).runs
    half = JobFolder.create()
    os.utime(half.path, (0, 0))
    living = JobFolder.create()
    making = JobFolder.create()
    assert {folder.path for folder in job_folders()} == {living.path, making.path}


@pytest.fixture
def killed(base: Path) -> Iterator[tuple[JobFolder, subprocess.Popen[bytes]]]:
    """The folder of a process that is a zombie by now, where its launcher has left word too."""
    with subprocess.Popen(["sleep", "600"]) as child:
        folder = JobFolder.create()
        folder.publish(RunningJob("../run 7", 1, folder.socket, child.pid))
        launched(child.pid).leave()
        job = folder.job()
        assert job is not None and job.runs and launched_jobs() == [launched(child.pid)]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        yield folder, child


def test_nobody_has_to_wait_for_the_dead(killed: tuple[JobFolder, subprocess.Popen[bytes]]) -> None:
    """Without an init, as in many containers, they stay zombies."""
    folder, child = killed
    job = folder.job()
    assert job is not None and not job.runs and folder.is_left()
    assert launched_jobs() == []
    child.wait(30)


def test_a_system_without_births(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the number of a process is all that is known of it."""
    monkeypatch.setattr(job_folder, "birth_of", lambda _: "")
    JobFolder.create().publish(RunningJob("../run 7", 1, "", os.getpid()))
    launched(os.getpid()).leave()
    (folder,) = job_folders()
    assert not folder.is_left() and launched_jobs() == [launched(os.getpid())]


def test_a_number_may_be_another_processs_later(base: Path) -> None:
    """Of a machine with few numbers, or after weeks."""
    folder = JobFolder.create()
    folder.publish(RunningJob("../run 7", 1, folder.socket, os.getpid()))
    launched(os.getpid()).leave()
    for file in (folder.path / "job", *user_folder().glob("launched-*")):
        text = file.read_text()
        former = text.replace('"born": "', '"born": "7')
        assert former != text
        file.write_text(former)
    assert folder.is_left()
    assert launched_jobs() == []


def test_a_coordinator_of_another_namespace_stays(base: Path) -> None:
    """Its process has another number there: who listens at the socket lives, and keeps it."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(30)
    folder = JobFolder.create()
    folder.publish(job := RunningJob("train", 1, folder.socket, ended.pid))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(folder.socket.removeprefix("unix:"))
        listener.listen()
        JobFolder.create()
        assert job.runs and folder.job() == job
    JobFolder.create()
    assert folder.job() is None


def test_credentials_are_those_files_that_are_there(base: Path) -> None:
    """A job without any has none."""
    folder = JobFolder.create()
    assert folder.credentials().empty
    (folder.path / "token").write_text("a token of the job, long enough")
    shown = folder.credentials("the key of its processes")
    assert (shown.token_file, shown.key, shown.tls_ca) == (
        str(folder.path / "token"),
        "the key of its processes",
        None,
    )


def test_a_path_too_long_for_sockets_is_avoided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder is in /tmp then. A path of a socket is counted in bytes."""
    for long in (str(tmp_path / ("long" * 30)), f"/tmp/{'ü' * 40}"):
        monkeypatch.setattr(tempfile, "tempdir", long)
        assert user_folder().parent == Path(f"/tmp/holdfast-{os.getuid()}")


def test_a_cleaner_passes_over_a_folder_in_use(base: Path) -> None:
    """systemd-tmpfiles takes a lock before it enters a folder: whoever has made it holds one."""
    for _ in range(2):  # several launchers of a user do
        JobFolder.create()
    descriptor = os.open(base / f"holdfast-{os.getuid()}", os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_an_open_folder_is_closed_or_refused(base: Path) -> None:
    """Our own with another mode is closed; another user's, a link or a file is refused, and no job
    is read from there.
    """
    path = user_folder(create=True).parent
    path.chmod(0o777)
    assert stat.S_IMODE(user_folder(create=True).parent.stat().st_mode) == 0o700
    shutil.rmtree(path)
    path.symlink_to(base)
    (base / user_folder().name / "job-1").mkdir(parents=True)
    with pytest.raises(
        CoordinationError,
        match=f"{path}: expected a folder of user {os.getuid()}, found no folder of {os.getuid()}",
    ):
        JobFolder.create()
    assert job_folders() == []
    path.unlink()
    if os.getuid() == 0:
        path.mkdir()
        os.chown(path, 65534, 65534)
        with pytest.raises(
            CoordinationError,
            match="found a folder of 65534; remove it, or set TMPDIR to another folder",
        ):
            JobFolder.create()


def launched(pid: int, job_id: str = "../run 7") -> LaunchedJob:
    """Returns the word of a launcher that waits for machines."""
    launcher = {"state": "scheduling", "waiting_for": "room"}
    return LaunchedJob(job_id, pid, "/logs", launcher, "")


def test_a_launcher_that_lives_is_heard(base: Path) -> None:
    """With where its lines are; whatever the job is called, no file lies elsewhere."""
    word = launched(os.getpid())
    word.leave()
    assert launched_jobs("../run 7") == [word]
    assert launched_jobs("run 7") == []
    assert [path.parent for path in base.rglob("launched-*")] == [user_folder()]


def test_a_launcher_that_died_says_nothing(base: Path) -> None:
    """Its last word is not how the job is now."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    launched(child.pid).leave()
    assert launched_jobs("../run 7") == []
    launched(os.getpid(), "another").leave()
    assert len([*base.rglob("launched-*")]) == 1, "the next launcher removes what it has left"


def test_what_another_host_has_is_left_alone(base: Path, tmp_path: Path) -> None:
    """Hosts may share the temporary folder. No process number says who lives on another one."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    (tmp_path / "other").write_text("7d1c2f0e-of-another-start\n")
    with pytest.MonkeyPatch.context() as there:
        there.setattr(mounts, "BOOT_ID", tmp_path / "other")
        theirs = JobFolder.create()
        theirs.publish(job := RunningJob("train", 1, theirs.socket, ended.pid))
        launched(ended.pid).leave()
    own = JobFolder.create()
    launched(os.getpid()).leave()
    assert job_folders() == [own] and launched_jobs() == [launched(os.getpid())]
    assert theirs.job() == job and len([*base.rglob("launched-*")]) == 2


def test_how_it_ended_stays(base: Path) -> None:
    """In the words of the launcher's states, with the reason, until the job runs again; the newest
    comes last, and none is kept for longer than an hour.
    """
    launcher = {"state": "finished", "why": "all 2 processes are done", "attempt": 2}
    ended = LaunchedJob(
        "j", os.getpid(), "/logs", launcher, "a", ended_unix_s=time.time(), exit_code=0
    )
    replace(ended, ended_unix_s=time.time() - 5, pid=3, launcher={"state": "failed"}).leave()
    ended.leave()
    assert launched_jobs("j")[-1] == ended
    again = LaunchedJob("j", os.getpid(), "", {"state": "running"}, "b")
    again.leave()
    assert launched_jobs("j")[-1] == again
    replace(ended, ended_unix_s=time.time() - 4000, pid=4).leave()
    again.leave()
    assert len([*base.rglob("launched-*")]) == 2, "for an hour"


@pytest.mark.parametrize("unread", ["/tmp", "/proc"])
def test_without_descriptors_nothing_of_others_goes(
    base: Path, monkeypatch: pytest.MonkeyPatch, unread: str
) -> None:
    """A launcher that cannot read what another one has left, or about its process, takes it for
    nothing dead.
    """
    read = Path.read_text
    living = JobFolder.create()
    living.publish(RunningJob("train", 1, living.socket, os.getpid()))
    os.utime(living.path, (0, 0))
    LaunchedJob("train", os.getpid(), "", {}, "").leave()
    with monkeypatch.context() as none_free:

        def refuse(path: Path, *arguments: str, **named: str) -> str:
            if path.is_relative_to(unread):
                raise OSError(errno.EMFILE, "Too many open files", str(path))
            return read(path, *arguments, **named)

        none_free.setattr(Path, "read_text", refuse)
        JobFolder.create().remove()
        with contextlib.suppress(OSError):  # it has no word to leave
            LaunchedJob("other", os.getpid(), "", {}, "").leave()
    assert living.job() is not None
    heard = {"train"} if unread == "/proc" else {"train", "other"}
    assert {job.job_id for job in launched_jobs()} == heard

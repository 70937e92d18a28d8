"""Locks on files: where they hold, and how one is taken while sweeps run."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint.layouts.orbax.metadata import TEMPORARY
from holdfast.checkpoint.layouts.orbax.write import _remove_dead
from holdfast.checkpoint.steps import file_lock
from holdfast.checkpoint.steps.file_lock import LOCK_NAME, hold_lock_in, locks_are_local
from holdfast.coordination import mounts

MOUNTS = """\
22 1 259:1 / / rw,relatime - ext4 /dev/root rw,discard
31 22 0:44 / /scratch rw,relatime - lustre 10.0.0.1@tcp:/fs rw,{lustre},user_xattr,lazystatfs
32 22 0:45 / /home\\040dirs rw,relatime - nfs4 server:/home rw,vers=4.2,hard,{nfs},addr=10.0.0.2
33 31 0:46 / /scratch/inner rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("folder", "lustre", "nfs", "local"),
    [
        ("/scratch/run", "localflock", "local_lock=none", True),
        ("/scratch/run", "flock", "local_lock=all", False),
        ("/scratch/inner/run", "localflock", "local_lock=all", False),
        ("/scratchy", "localflock", "local_lock=all", False),
        ("/home dirs/me/run", "flock", "local_lock=flock", True),
        ("/home dirs/me/run", "flock", "nolock", True),
        ("/home dirs/me/run", "localflock", "local_lock=none", False),
        ("/home dirs/me/run", "localflock", "local_lock=posix", False),
    ],
)
def test_a_mount_tells_whether_locks_are_local(
    folder: str, lustre: str, nfs: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the options of the innermost mount above the folder."""
    table = tmp_path / "mounts"
    monkeypatch.setattr(mounts, "MOUNTINFO", table)
    assert not locks_are_local(Path(folder))
    table.write_text(MOUNTS.format(lustre=lustre, nfs=nfs))
    assert locks_are_local(Path(folder)) is local


def test_a_lock_that_a_sweep_has_is_waited_for(tmp_path: Path) -> None:
    """A sweep holds it while it removes the folder; however slow it is, the writer begins anew."""
    folder = tmp_path / "made"
    swept = hold_lock_in(folder)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold_lock_in, folder)
        with pytest.raises(TimeoutError):
            held.result(timeout=0.2)
        shutil.rmtree(folder)
        swept.close()
        with contextlib.closing(held.result(timeout=20)) as lock:
            assert lock.is_at(folder / LOCK_NAME)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
def test_where_no_folder_can_be_made_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that others had the lock: the kernel's folders answer that the new one is not there."""
    monkeypatch.setattr(file_lock, "LOCK_WAIT_S", 0.1)
    with pytest.raises(FileNotFoundError, match="/proc/root-of-mine"):
        hold_lock_in(Path("/proc/root-of-mine/new"))


def test_writers_begin_while_sweeps_run(tmp_path: Path) -> None:
    """Each gets its lock, whichever step of its beginning a sweep meets, and keeps its folder."""
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            _remove_dead(tmp_path / "step")

    with ThreadPoolExecutor(3) as pool:
        sweeps = [pool.submit(sweep) for _ in range(3)]
        try:
            for number in range(300):
                folder = tmp_path / f"step{TEMPORARY}-{number}"
                with contextlib.closing(hold_lock_in(folder)) as lock:
                    (folder / "metadata").touch()
                    assert lock.is_at(folder / LOCK_NAME)
        finally:
            ended.set()
        for each in sweeps:
            each.result(timeout=20)

"""What else somebody put into a root: nothing is written or deleted behind a link, and pipes and sockets hang nobody."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, KeepLast, load, sweep, verify

STATE = {"x": np.arange(3.0)}


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """A folder outside the root with files that look like anything."""
    folder = tmp_path / "treasure"
    folder.mkdir()
    for name in ("lock", "claim.json", "thesis.txt", "00000-00000-0123456789abcdef.safetensors"):
        (folder / name).write_text("mine")
    return folder


def _saved(root: Path, steps: int = 2) -> Path:
    with CheckpointManager(root) as manager:
        for step in range(1, steps + 1):
            manager.save(step, STATE)
            manager.wait_until_finished()
    return root


@pytest.mark.parametrize(
    "name",
    [
        ".holdfast/fenced-0123abcd",
        ".holdfast/new-0123abcd",
        ".holdfast/0123abcd",
        ".holdfast/holds",
        "7",
        "7/state",
        "1/other",
        "1/state/sub",
    ],
)
def test_a_link_in_a_root_is_not_followed_by_what_deletes(name: str, treasure: Path, tmp_path: Path) -> None:
    """Opening for writing, sweeping and keep policies delete nothing behind a link."""
    root = _saved(tmp_path / "root")
    link = root / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(treasure, target_is_directory=True)
    before = sorted(path.name for path in treasure.iterdir())
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        manager.save(3, STATE)
        manager.wait_until_finished()
    sweep(root, force=True)
    assert sorted(path.name for path in treasure.iterdir()) == before
    assert load(root)["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["9", "9/state"])
def test_a_save_is_not_written_through_a_link(name: str, treasure: Path, tmp_path: Path) -> None:
    """A step or item folder that is a link is an error that names it; nothing is written behind it."""
    root = _saved(tmp_path / "root")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(treasure, target_is_directory=True)
    before = sorted(path.name for path in treasure.iterdir())
    with CheckpointManager(root) as manager:
        manager.save(9, STATE)
        with pytest.raises(CheckpointError, match="link"):
            manager.wait_until_finished()
        manager.save(10, STATE)
        manager.wait_until_finished()
    assert sorted(path.name for path in treasure.iterdir()) == before


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_fifo, _socket, _circle])
@pytest.mark.parametrize("what", ["record", "pack"])
def test_a_pipe_in_place_of_a_file_is_an_error_at_once(what: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """Restoring, verifying, sweeping and saving beside it end; the error names the file."""
    root = _saved(tmp_path / "root")
    path = root / "1" / "checkpoint.json" if what == "record" else next((root / "1" / "state").iterdir())
    path.unlink()
    make(path)
    for call in (lambda: verify(root / "1"), lambda: load(root / "1")):
        with pytest.raises(CheckpointError, match=path.name):
            call()
    sweep(root)
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        manager.save(3, STATE)
        manager.wait_until_finished()
        assert manager.restore(3)["x"].tolist() == [0, 1, 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["claim.json", "lock"])
def test_a_pipe_in_a_claim_is_passed_over(name: str, tmp_path: Path) -> None:
    """A claim that is not made of files hangs nobody who opens the root."""
    root = _saved(tmp_path / "root")
    claim = root / ".holdfast" / "0123abcd"
    claim.mkdir(parents=True)
    for file in ("claim.json", "lock"):
        (claim / file).write_text("{}")
    (claim / name).unlink()
    os.mkfifo(claim / name)
    with CheckpointManager(root) as manager:
        manager.save(3, STATE)
        manager.wait_until_finished()
    sweep(root)
    assert verify(root).step == 3
    shutil.rmtree(root)

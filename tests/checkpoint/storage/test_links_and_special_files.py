"""What else somebody put into a root: nothing is written or deleted behind a link, and pipes and
sockets hang nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    KeepLast,
    Options,
    load,
    sweep,
    verify,
)
from holdfast.checkpoint.storage.base import NameTaken
from holdfast.checkpoint.storage.local import LocalStorage

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
def test_a_link_in_a_root_is_not_followed_by_what_deletes(
    name: str, treasure: Path, tmp_path: Path
) -> None:
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
    """A step or item folder that is a link is an error that names it, or what lies behind it;
    nothing is written there.
    """
    root = _saved(tmp_path / "root")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(treasure, target_is_directory=True)
    before = sorted(path.name for path in treasure.iterdir())
    with CheckpointManager(root) as manager:
        manager.save(9, STATE)
        with pytest.raises(CheckpointError, match=r"link|root/9 holds a checkpoint of another"):
            manager.wait_until_finished()
        manager.save(10, STATE)
        manager.wait_until_finished()
    assert sorted(path.name for path in treasure.iterdir()) == before


def test_claims_behind_a_link_are_nobodys(treasure: Path, tmp_path: Path) -> None:
    """Where the folder of claims is a link, a sweep sees no claim, and neither fences nor removes
    anything behind it.
    """
    root = _saved(tmp_path / "root")
    for name in ("0123abcd", "fenced-0123abce", "new-0123abcf"):
        shutil.copytree(treasure, treasure / name, ignore=shutil.ignore_patterns("????????", "*-*"))
    os.rmdir(root / ".holdfast")
    (root / ".holdfast").symlink_to(treasure, target_is_directory=True)
    before = sorted(str(path) for path in treasure.rglob("*"))
    assert sweep(root, force=True).fenced == []
    with pytest.raises(CheckpointError, match="link"):
        CheckpointManager(root)
    assert sorted(str(path) for path in treasure.rglob("*")) == before


@pytest.mark.parametrize("kind", ["link", "circle", "pipe"])
def test_a_folder_of_holds_that_is_none_stops_no_keep_policy(
    kind: str, treasure: Path, tmp_path: Path
) -> None:
    """Old steps go as the policy says; an old hold behind a link stays."""
    root = _saved(tmp_path / "root")
    old = treasure / "1-1-1-0123abcd"
    old.write_text("mine")
    os.utime(old, (1, 1))
    holds = root / ".holdfast" / "holds"
    {
        "link": lambda: holds.symlink_to(treasure),
        "circle": lambda: _circle(holds),
        "pipe": lambda: os.mkfifo(holds),
    }[kind]()
    with CheckpointManager(root, keep_policy=KeepLast(1)) as manager:
        manager.save(3, STATE)
        manager.wait_until_finished()
        assert manager.all_steps() == [3] and old.exists()


@pytest.mark.parametrize("single_writer", [False, True])
def test_a_commit_replaces_no_link(single_writer: bool, tmp_path: Path) -> None:
    """A record that is a link to nothing has the name: NameTaken, and it stays. A claim behind a
    link is none to commit from.
    """
    storage = LocalStorage(tmp_path / "root", single_writer=single_writer)
    (tmp_path / "root" / "claim").mkdir(parents=True)
    (tmp_path / "root" / "1").mkdir()
    (tmp_path / "root" / "1" / "record").symlink_to(tmp_path / "nothing")
    with pytest.raises(NameTaken):
        storage.commit("1/record", b"{}", "claim")
    assert (tmp_path / "root" / "1" / "record").is_symlink() and not (tmp_path / "nothing").exists()
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="link"):
        storage.commit("2/record", b"{}", "linked")
    assert (
        not (tmp_path / "root" / "2" / "record").exists()
        and list((tmp_path / "outside").iterdir()) == []
    )


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


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: it never ends
    except PermissionError:
        pytest.skip("device files are for root")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_fifo, _socket, _circle, _device])
@pytest.mark.parametrize("what", ["record", "pack"])
def test_a_pipe_in_place_of_a_file_is_an_error_at_once(
    what: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """Restoring, verifying, sweeping and saving beside it end; the error names the file."""
    root = _saved(tmp_path / "root")
    path = (
        root / "1" / "checkpoint.json"
        if what == "record"
        else next((root / "1" / "state").iterdir())
    )
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
@pytest.mark.parametrize("make", [_fifo, _socket, _circle, _device])
@pytest.mark.parametrize("name", ["claim.json", "lock"])
def test_a_pipe_in_a_claim_is_passed_over(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """A claim that is not made of files hangs nobody who opens the root."""
    root = _saved(tmp_path / "root")
    claim = root / ".holdfast" / "0123abcd"
    claim.mkdir(parents=True)
    for file in ("claim.json", "lock"):
        (claim / file).write_text("{}")
    (claim / name).unlink()
    make(claim / name)
    with CheckpointManager(root) as manager:
        manager.save(3, STATE)
        manager.wait_until_finished()
    sweep(root)
    assert verify(root).step == 3


@pytest.mark.timeout(60)
def test_a_claim_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    """A sparse claim of a terabyte is that of an unknown writer."""
    root = _saved(tmp_path / "root")
    claim = root / ".holdfast" / "0123abcd"
    claim.mkdir(parents=True)
    (claim / "lock").touch()
    with open(claim / "claim.json", "wb") as file:
        file.truncate(1 << 40)
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == [1, 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_fifo, _socket, _circle, _device, Path.mkdir])
def test_what_stands_at_the_name_of_a_fenced_claim_stops_no_fence(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """A dead writer's claim is taken away though something else has the name that it gets; so is
    that of a half-made one.
    """
    root = _saved(tmp_path / "root")
    dead = root / ".holdfast" / "0123abcd"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "claim.json").write_text("{}")
    make(root / ".holdfast" / "fenced-0123abcd")
    if (root / ".holdfast" / "fenced-0123abcd").is_dir():
        os.mkdir(
            root / ".holdfast" / "fenced-0123abcd" / "folder"
        )  # a fence cannot replace it, a sweep not empty it
    make(root / ".holdfast" / "new-0123abcd")
    with CheckpointManager(root) as manager:
        manager.save(3, STATE)
        manager.wait_until_finished()
    assert not dead.exists() and verify(root).step == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_fifo, _socket, _circle, _device])
def test_a_file_is_not_written_into_a_pipe(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Not even where somebody reads it: an error, and nothing has arrived."""
    make(tmp_path / "pack")
    reader = None
    with contextlib.suppress(OSError):
        reader = os.open(tmp_path / "pack", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError):
        LocalStorage(tmp_path).write("pack", 3, [(0, [memoryview(b"abc")])])
    if reader is not None:
        if make is _fifo:
            assert os.read(reader, 3) == b""
        os.close(reader)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_fifo, _socket, _circle, _device])
def test_a_root_whose_claims_have_no_folder(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Opening for writing is an error at once that says how to only read; reading and sweeping
    go.
    """
    root = _saved(tmp_path / "root")
    os.rmdir(root / ".holdfast")
    make(root / ".holdfast")
    with pytest.raises(
        CheckpointError,
        match=r"cannot write a checkpoint in .*\.holdfast.*Options\(read_only=True\)",
    ):
        CheckpointManager(root)
    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        assert manager.restore()["x"].tolist() == [0, 1, 2]
    assert sweep(root).fenced == []

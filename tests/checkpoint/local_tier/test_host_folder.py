"""The folder of a run on one host: what is written over, what counts as there, and what is
deleted.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointError
from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.local_tier.host_folder import HostFolder, HostStorage, RunFolder
from holdfast.checkpoint.local_tier.parts import LocalKey, Part

RUN = "0" * 32
KEY = LocalKey(7, 1, "0000000100000001", 2)


def _saved(folder: HostFolder, key: LocalKey = KEY, data: bytes = b"x" * 100) -> Part:
    """Writes a part of one pack."""
    name = pack_name(1, 0, key.save_id)
    folder.storage.write(f"{key.folder}/state/{name}", len(data), [(0, [memoryview(data)])])
    report = ItemReport(1, "p", (FileReport(name, len(data), 0, 0),))
    found = Part(folder.run, key, 1, {"state": report})
    folder.publish(found, found.to_bytes())
    return found


def _next(number: int, key: LocalKey = KEY) -> LocalKey:
    return key._replace(step=key.step + number, save_id=f"00000001{number:08x}")


@pytest.fixture
def folder(tmp_path: Path) -> HostFolder:
    return HostFolder(tmp_path, RUN)


def _pack(folder: HostFolder, key: LocalKey) -> Path:
    return folder.path / key.folder / "state" / pack_name(1, 0, key.save_id)


def test_a_run_is_its_users_alone(tmp_path: Path) -> None:
    """Whatever the umask: the folder above, which all may write into, keeps its mode."""
    tmp_path.chmod(0o777)
    umask = os.umask(0)
    try:
        folder = RunFolder(tmp_path, syncs=False).open(RUN)
        _saved(folder)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777
    modes = {
        path.is_dir(): stat.S_IMODE(path.stat().st_mode)
        for path in [folder.path, *folder.path.rglob("*")]
    }
    assert modes == {True: 0o700, False: 0o600}


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (lambda path: path.symlink_to(path.parent), "is a link"),
    "a file": (lambda path: path.touch(), "is no folder"),
    "open to all": (
        lambda path: (path.mkdir(), path.chmod(0o777)),
        "is a folder with mode 777",
    ),
    "another user's": (
        lambda path: (path.mkdir(0o700), os.chown(path, 12345, -1)),
        "is a folder of user 12345",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_folder_of_others_is_refused(kind: str, tmp_path: Path) -> None:
    """With what was found, what was expected, and what to do."""
    make, found = OTHERS[kind]
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("needs root, to give a folder to another user")
    make(tmp_path / RUN)
    expected = f"{found}; expected a folder of user {os.geteuid()} with mode 700, or none. Move it"
    with pytest.raises((CheckpointError, OSError), match=expected):
        RunFolder(tmp_path, syncs=False).open(RUN)


def test_a_run_folder_is_never_more_open_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of a host open it at once: neither takes it for another's."""
    chmod = os.chmod
    looked = []

    def look_and_chmod(path: Path, mode: int) -> None:
        looked.append(RunFolder(tmp_path, syncs=False).open(RUN))
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", look_and_chmod)
    umask = os.umask(0o022)
    try:
        RunFolder(tmp_path, syncs=False).open(RUN)
    finally:
        os.umask(umask)
    assert looked


@pytest.mark.parametrize("size", [0, 50, 100, 200])
def test_what_was_let_go_is_written_over(size: int, folder: HostFolder) -> None:
    """The next file has its inode and its own bytes, no more and no fewer; the old folder goes."""
    _saved(folder)
    inode = _pack(folder, KEY).stat().st_ino
    folder.let_go(KEY)
    assert folder.scan() == []
    assert folder.storage.spare_bytes() == 100
    _saved(folder, _next(1), b"y" * size)
    assert _pack(folder, _next(1)).stat().st_ino == inode
    assert _pack(folder, _next(1)).read_bytes() == b"y" * size
    assert not (folder.path / KEY.folder).exists()
    assert folder.storage.spare_bytes() == 0


def test_what_is_someone_elses_too_is_not_written_over(folder: HostFolder, tmp_path: Path) -> None:
    """A file with a second name, a link in its place, one that is gone: the next is a fresh one."""
    _saved(folder)
    os.link(_pack(folder, KEY), tmp_path / "second")
    folder.let_go(KEY)
    _saved(folder, _next(1), b"y" * 100)
    assert (tmp_path / "second").read_bytes() == b"x" * 100
    folder.let_go(_next(1))
    _pack(folder, _next(1)).unlink()
    _pack(folder, _next(1)).symlink_to(tmp_path / "second")
    _saved(folder, _next(2), b"z" * 100)
    assert (tmp_path / "second").read_bytes() == b"x" * 100
    folder.let_go(_next(2))
    _pack(folder, _next(2)).unlink()
    _saved(folder, _next(3), b"z" * 100)
    assert _pack(folder, _next(3)).read_bytes() == b"z" * 100


@pytest.mark.parametrize("syncs", [False, True])
def test_a_part_is_durable_when_it_has_its_name_if_it_is_to_be(
    syncs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its packs and their names, fresh and written over, then its own text, then its name;
    else neither file nor folder is waited for.
    """
    calls: list[str] = []
    fsync = os.fsync
    replace_file = os.replace

    def note_fsync(file: int) -> None:
        fsync(file)
        calls.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path / RUN))

    def note_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    folder = HostFolder(tmp_path, RUN, syncs=syncs)
    for key in (KEY, _next(1)):
        calls.clear()
        with folder.storage.synced_once(f"{key.folder}/state"):
            _saved(folder, key)
        at = calls.index("replace")
        part = key.part_name(1)
        files = [
            str(_pack(folder, key).relative_to(folder.path)),
            f"{key.folder}/state",
            part.replace(".json", ".new"),
        ]
        assert [name in calls[:at] for name in files] == [syncs, syncs, syncs]
        assert (key.folder in calls[at:]) == syncs
        if syncs:
            assert calls.index(files[0]) < calls.index(files[1])
        else:
            assert calls == ["replace"]
        folder.let_go(key)


def test_nothing_is_written_behind_a_link(folder: HostFolder, tmp_path: Path) -> None:
    """As in every root."""
    (tmp_path / "elsewhere").mkdir()
    folder.path.mkdir()
    (folder.path / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link"):
        _saved(folder)


def test_a_part_is_there_with_all_its_files_or_not(folder: HostFolder) -> None:
    """Cut, missing, damaged, in another's place, of another run: passed over."""
    assert folder.scan() == []
    found = _saved(folder)
    assert folder.scan() == [found]
    path = folder.path / KEY.part_name(1)
    data = path.read_bytes()
    for damaged in (b"", data[:-10], data.replace(b'"process":1', b'"process":0')):
        path.write_bytes(damaged)
        assert folder.scan() == []
    path.write_bytes(replace(found, run="1" * 32).to_bytes())
    assert folder.scan() == []
    path.write_bytes(data)
    path.rename(path.with_name("part-00000.json"))
    assert folder.scan() == []
    (path.parent / "part-00000.json").rename(path)
    os.truncate(_pack(folder, KEY), 99)
    assert folder.scan() == []
    _pack(folder, KEY).unlink()
    assert folder.scan() == []


def test_what_earlier_attempts_left_is_pruned(folder: HostFolder) -> None:
    """All of it, whole or not, but what stays; nothing of this writer, nothing of a later branch,
    nothing that is not ours.
    """
    mine, old, stays, later = (
        KEY,
        *(_next(number)._replace(save_id=f"0000000{number}00000001") for number in (2, 3, 4)),
    )
    later = later._replace(branch=5)
    for key in (mine, old, stays, later):
        _saved(folder, key)
    (folder.path / "1" / "notes-of-mine").mkdir()
    folder.prune(4, "00000001", [stays])
    assert sorted(found.key for found in folder.scan()) == sorted([mine, stays, later])
    assert (folder.path / "1" / "notes-of-mine").is_dir()
    assert not (folder.path / old.folder).exists()


def test_spare_files_go_at_the_end(folder: HostFolder) -> None:
    """And folders that are empty then; what is published stays."""
    _saved(folder)
    _saved(folder, _next(1))
    assert folder.saves() == [KEY, _next(1)]
    folder.let_go(KEY)
    folder.close()
    assert [found.key for found in folder.scan()] == [_next(1)]
    assert not (folder.path / KEY.folder).exists()


def test_a_part_that_cannot_get_its_name_leaves_nothing(folder: HostFolder) -> None:
    """What was begun of it is gone, and so is its folder once the save is let go."""
    path = folder.path / KEY.part_name(1)
    path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        folder.publish(Part(RUN, KEY, 1, {}), b"{}")
    path.rmdir()
    folder.let_go(KEY)
    assert [*folder.path.iterdir()] == []


def test_what_is_let_go_leaves_no_empty_folder(folder: HostFolder) -> None:
    """Neither that of a save nor that of its branch, with files of its own or without."""
    empty = KEY._replace(branch=3)
    none = KEY._replace(branch=4)
    found = Part(RUN, empty, 1, {})
    folder.publish(found, found.to_bytes())
    folder.let_go(empty)
    (folder.path / none.folder).mkdir(parents=True)  # nothing came of it
    folder.let_go(none)
    assert [*folder.path.iterdir()] == []
    _saved(folder)
    folder.let_go(KEY)
    _saved(folder, KEY._replace(branch=2))
    assert [path.name for path in folder.path.iterdir()] == ["2"]


def test_an_error_while_writing_leaves_no_part(tmp_path: Path) -> None:
    """The file that was begun is nobody's: no part names it."""

    def broken() -> object:
        yield 0, [memoryview(b"abc")]
        raise OSError(5, "the device says no")

    storage = HostStorage(tmp_path)
    with pytest.raises(OSError, match="the device says no"):
        storage.write("1/x/state/y", 10, broken())  # type: ignore[arg-type]
    storage.spare(["1/x/state/y", "1/x/state/never"])
    assert storage.spare_bytes() == 3
    (tmp_path / "1/x/state/y").unlink()  # as a cleaner of old files does
    assert storage.spare_bytes() == 0


STDIN_CLOSED = """
import os, sys
from pathlib import Path
from holdfast.checkpoint.local_tier.host_folder import HostStorage

storage = HostStorage(Path(sys.argv[1]))
os.close(0)
storage.write("1/state/a", 3, [(0, [memoryview(b"old")])])
storage.spare(["1/state/a"])
storage.write("2/state/a", 3, [(0, [memoryview(b"new")])])
assert (Path(sys.argv[1]) / "2/state/a").read_bytes() == b"new"
assert os.open(os.devnull, os.O_RDONLY) == 0, "the spare file was closed again"
"""


def test_a_full_disk_is_told_with_the_file(
    folder: HostFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name nobody knows which of two disks is full."""

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left") as caught:
        folder.storage.write("1/a", 3, [(0, [memoryview(b"abc")])])
    assert caught.value.filename == str(folder.path / "1/a")


def test_a_spare_file_may_have_the_number_of_stdin(tmp_path: Path) -> None:
    """Descriptor 0 is one like all others, where a job has closed its standard streams."""
    arguments = [sys.executable, "-c", STDIN_CLOSED, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

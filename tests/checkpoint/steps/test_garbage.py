"""Sweeping what dead writers left."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, load, save, sweep
from holdfast.checkpoint.steps.claims import FOLDER, this_writer
from holdfast.checkpoint.steps.garbage import fence_others, sweep_files
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import Fenced
from tests.support.paths import program

WRITER = "0a0b0c0d"
OTHER = "00c0ffee"


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_step_saved_while_its_empty_folder_is_swept_stays(tmp_path: Path) -> None:
    """The whole save comes between the sweep's two looks into the folder, which was empty."""
    root = tmp_path / "root"

    with CheckpointManager(root) as manager:

        class Slow(LocalStorage):
            def list(self, folder: str, **how: bool) -> list[Entry]:
                found = super().list(folder, **how)
                if folder == "5" and how.get("recursive"):
                    manager.save(5, {"x": np.arange(3.0)})
                    manager.wait_until_finished()
                return found

        # The sweep of its own opening, in the background, would take the empty folder.
        assert manager._catalog.state.worker.wait(60)
        (root / "5").mkdir()
        storage = Slow(root)
        sweep_files(storage, LocalClaims(storage))
        assert manager.latest_step() == 5
        assert manager.restore(5, like={"x": np.zeros(3)})["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("missed", ["checkpoint.json", ".holdfast"])
def test_what_is_not_found_costs_no_step(
    missed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a shared file system says ENOENT of a record, again and again, or of the folder
    of claims seven times of eight: no pack is deleted for that.
    """
    root = tmp_path / "root"
    with CheckpointManager(root) as manager:
        manager.save(1, {"x": np.arange(3.0)})
        manager.wait_until_finished()
        if missed == ".holdfast":
            put(
                root, f"2/state/00000-00000-{manager._root.writer.id}00000002.safetensors"
            )  # of a save in flight
        before = names_in(root)
        real = {name: getattr(os, name) for name in ("open", "scandir")}
        asked: list[str] = []

        def finds(name: str, path: Any, *more: Any) -> Any:
            if str(path).endswith(missed):
                asked.append(str(path))
                if missed == ".holdfast" and len(asked) % 8 == 0:
                    return real[name](path, *more)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return real[name](path, *more)

        claims = LocalClaims(LocalStorage(root))
        if missed == "checkpoint.json":
            claims.fence(manager._root.writer.id)  # its packs are suspects then
            claims.forget_fenced()
            before = [name for name in before if not name.startswith(".holdfast")]
            put(
                root, "1/state/00000-00000-00c0ffee00000001.safetensors"
            )  # without another's pack beside it the sweep would not look
            before = sorted([*before, "1/state/00000-00000-00c0ffee00000001.safetensors"])
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, functools.partial(finds, name))
            with contextlib.suppress(OSError):
                sweep_files(LocalStorage(root), claims)
        assert asked and names_in(root) == before


def test_a_sweep_spares_writers_that_stand(tmp_path: Path) -> None:
    """Packs of a writer with a claim stay; those without one go, unless the step's record names
    them; empty folders go too.
    """
    storage = LocalStorage(tmp_path)
    writer = this_writer()
    claims = LocalClaims(storage)
    claims.take(writer)
    stays = f"5/state/00000-00000-{writer.id}.safetensors"
    goes = f"5/state/00000-00000-{OTHER}.safetensors"
    put(tmp_path, stays, goes)
    (tmp_path / "6" / "state").mkdir(parents=True)
    assert (
        sweep_files(storage, claims) == [goes]
        and (tmp_path / stays).exists()
        and not (tmp_path / "6").exists()
    )
    claims.fence(writer.id)
    assert sweep_files(storage, claims) == [stays] and not (tmp_path / "5").exists()


class _LinksLate(LocalStorage):
    """Makes a fenced writer's link, whose record the kernel had found before, when packs go."""

    def __init__(self, root: Path, record: Path) -> None:
        super().__init__(root)
        self._record = os.open(record, os.O_RDONLY)

    def link_late(self, name: str) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            # Through /proc the file is linked as it is, whatever its name is now.
            os.link(f"/proc/self/fd/{self._record}", self.path / name, src_dir_fd=folder)
        finally:
            os.close(folder)
            os.close(self._record)

    def delete(self, names: Sequence[str]) -> None:
        if any(name.endswith(".safetensors") for name in names):
            with pytest.raises(FileNotFoundError):
                self.link_late("5/checkpoint.json")
        super().delete(names)


def test_a_late_link_finds_no_record(tmp_path: Path) -> None:
    """Before packs of a fenced writer go, the record that it was about to link is gone."""
    goes = f"5/state/00000-00000-{OTHER}.safetensors"
    record = f".holdfast/fenced-{OTHER}/0123.record"
    put(tmp_path, goes, record)
    storage = _LinksLate(tmp_path, tmp_path / record)
    assert sweep_files(storage, LocalClaims(storage)) == [goes]
    assert names_in(tmp_path) == []


class _Watched(CountingStorage):
    """Notes what is listed with sizes, besides the bytes that are read."""

    def __init__(self, inner: LocalStorage) -> None:
        self.bytes_read: list[int] = []
        self.looked_at: list[str] = []
        super().__init__(inner, self.bytes_read.append)

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        self.looked_at += [] if names_only else [folder]
        return super().list(folder, recursive=recursive, names_only=names_only)


def test_a_sweep_of_whole_steps_reads_nothing(tmp_path: Path) -> None:
    """Names say enough where a step has packs of one save; a pack of another save has its record
    read, and goes.
    """
    with CheckpointManager(tmp_path) as manager:
        for step in range(5):
            manager.save(step, {"w": np.ones(3)})
    storage = _Watched(LocalStorage(tmp_path))
    claims = LocalClaims(LocalStorage(tmp_path))
    assert sweep_files(storage, claims) == []
    assert storage.bytes_read == [] and storage.looked_at == [FOLDER]
    stray = f"3/state/00000-00000-{OTHER}.safetensors"
    put(tmp_path, stray)
    assert sweep_files(storage, claims) == [stray] and len(storage.bytes_read) == 2


@pytest.mark.parametrize("how", ["save", "sweep"])
def test_a_killed_one_shot_saves_remains_are_swept(how: str, tmp_path: Path) -> None:
    """By the next save into that folder, or by `sweep`: its packs and its claim go, what is saved
    there stays.
    """
    root = tmp_path / "here"
    save(root, {"w": np.arange(3)})
    with subprocess.Popen(
        [sys.executable, str(program("one_shot_save_killed")), str(root)]
    ) as killed:
        assert killed.wait(60) == -9
    assert len(list((root / "state").iterdir())) == 2
    if how == "save":
        save(root, {"w": np.arange(6)}, overwrite=True)
    else:
        swept = sweep(root)
        assert len(swept.fenced) == len(swept.files) == 1
    assert len(list((root / "state").iterdir())) == 1
    assert load(root)["w"].shape == ((6,) if how == "save" else (3,))
    assert [path.name for path in root.iterdir() if path.name == FOLDER] == (
        [] if how == "save" else [FOLDER]
    )


def test_an_unsweepable_root_is_a_typed_error(tmp_path: Path) -> None:
    """The operating system's error becomes a CheckpointError that names the root and says what to
    do.
    """
    root = tmp_path / ("x" * 300)
    with pytest.raises(
        CheckpointError, match=r"xx cannot be swept: .*File name too long.*sweep again"
    ) as caught:
        sweep(root)
    assert caught.value.path == str(root)


def test_only_whom_one_may_fence_is_fenced(tmp_path: Path) -> None:
    """A living writer of no job stays, unless by force; each one that is fenced is named with the
    reason.
    """
    storage = LocalStorage(tmp_path)
    living = this_writer()
    me = this_writer()
    claims = LocalClaims(storage)
    claims.take(living)
    assert fence_others(claims, me) == ([], [living]) and claims.standing() == {living.id}
    assert (
        fence_others(claims, me, force=True).reasons == [f"writer {living.id} was fenced by force"]
        and claims.standing() == set()
    )


def test_two_managers_live_side_by_side(tmp_path: Path) -> None:
    """Neither fences the other; a sweep touches neither's unfinished saves."""
    with CheckpointManager(tmp_path) as one, CheckpointManager(tmp_path) as two:
        one.save(1, {"w": np.ones(3)})
        two.save(2, {"w": np.ones(3)})
        pack = tmp_path / "3" / "state" / f"00000-00000-{one._root.writer.id}.safetensors"
        # Made elsewhere: while it is empty, the end of a save may take the folder away.
        made = tmp_path.with_name(f"{tmp_path.name}-made")
        (made / "state").mkdir(parents=True)
        (made / "state" / pack.name).write_bytes(b"in flight")
        made.rename(tmp_path / "3")
        found = sweep(str(tmp_path))
        assert (found.fenced, found.files) == ([], []) and set(found.standing) == {
            one._root.writer.id,
            two._root.writer.id,
        }
        one.wait_until_finished()
        two.wait_until_finished()
        assert one.all_steps() == two.all_steps() == [1, 2]
    found = sweep(str(tmp_path))
    assert found.files == [f"3/state/{pack.name}"] and not (tmp_path / "3").exists()


def test_sweep_by_force_fences_the_living(tmp_path: Path) -> None:
    """`sweep(force=True)` takes every claim; the writer learns of it at its next commit, and harms
    nothing.
    """
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": np.ones(3)})
    manager.wait_until_finished()
    assert sweep(str(tmp_path), force=True).fenced == [
        f"writer {manager._root.writer.id} was fenced by force"
    ]
    manager.save(2, {"w": np.ones(3)})
    with pytest.raises(Fenced):
        manager.close()
    assert (
        sorted(os.listdir(tmp_path)) == [".holdfast", "1"]
        and os.listdir(tmp_path / ".holdfast") == []
    )


def test_what_a_sweep_never_touches(tmp_path: Path) -> None:
    """Steps with a record, whole or damaged; Orbax's files; foreign files; what is not named like
    ours.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)})
        manager.save(2, {"w": np.ones(3)})
    (tmp_path / "2" / "checkpoint.json").write_text("damaged")
    kept = [
        "2/state/00007-00000-00c0ffee.safetensors",
        "3/_METADATA",
        "3/default/d/0a1b",
        "4/state/model.safetensors",
        "x/state/y",
        "4.tmp/z",
    ]
    gone = [
        "1/state/00007-00000-00c0ffee.safetensors",
        "5/state/00000-00000-00c0ffee.safetensors",
        "5/cfg/00001-j-00c0ffee00000002.json",
    ]
    for name in kept + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "6" / "state").mkdir(parents=True)
    assert sorted(sweep(str(tmp_path)).files) == sorted(gone)
    assert (
        all((tmp_path / name).exists() for name in kept)
        and not (tmp_path / "5").exists()
        and not (tmp_path / "6").exists()
    )
    with CheckpointManager(tmp_path) as manager:
        assert {1, 2} <= set(manager.all_steps()) and np.array_equal(
            manager.restore(1)["w"], np.ones(3)
        )

"""Deleting the files of a step, and steps: first the record, then its packs; what cannot be deleted
stays whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    KeepAll,
    KeepLast,
    StepFacts,
    verify,
)
from holdfast.checkpoint.format.step_folders import has_record, list_steps
from holdfast.checkpoint.options import Statistics
from holdfast.checkpoint.policy import KeepPolicy
from holdfast.checkpoint.steps.background import BackgroundWorker
from holdfast.checkpoint.steps.index import StepIndex
from holdfast.checkpoint.steps.step_files import StepDeleter, delete_files
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import sealed_json


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_files_go_with_their_empty_folders(tmp_path: Path) -> None:
    """Named files go, and folders that are then empty; what else is there stays, with its
    folder.
    """
    put(tmp_path, "3/state/a", "3/state/b", "3/ema/c", "4/state/a")
    delete_files(LocalStorage(tmp_path), "3", ["state/a", "ema/c"])
    assert names_in(tmp_path) == ["3/state/b", "4/state/a"] and not (tmp_path / "3/ema").exists()
    delete_files(LocalStorage(tmp_path), "3", ["state/b", "state/missing"])
    assert not (tmp_path / "3").exists()


# --- a whole step


def index_of(
    storage: LocalStorage, keep_policy: KeepPolicy, worker: BackgroundWorker | None = None
) -> StepIndex:
    deleter = StepDeleter(storage, worker or BackgroundWorker(), Statistics())
    return StepIndex(storage, keep_policy, list_steps(storage), deleter)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """A root with steps 1 to 4, whose losses are 4, 1, 3, 2."""
    with CheckpointManager(tmp_path) as manager:
        for step, loss in enumerate([4, 1, 3, 2], 1):
            manager.save(step, {"w": np.full(10, step)}, metrics={"loss": loss})
    return LocalStorage(tmp_path)


def test_what_a_strange_record_names_is_left_for_a_sweep(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """Its checksum is right. Once it is gone the step may be saved anew, before what the old one
    had is deleted: the files of the new one stay.
    """
    (tmp_path / "2/checkpoint.json").write_bytes(sealed_json({"format": "holdfast", "version": 99}))
    began = threading.Event()
    goes_on = threading.Event()
    worker = BackgroundWorker()
    worker.put("waiting", lambda: (began.set(), goes_on.wait(60)))
    assert began.wait(60)
    assert not index_of(storage, KeepLast(1), worker).remove([2])
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"w": np.zeros(3)})
    shutil.copytree(tmp_path / "5", tmp_path / "2", dirs_exist_ok=True)
    before = names_in(tmp_path / "2")
    goes_on.set()
    assert worker.wait(60)
    assert names_in(tmp_path / "2") == before


def test_a_record_that_stays_keeps_its_packs(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """unlink() finds no record where there is one (a client of a shared file system may): the step
    stays, whole, to be deleted later.
    """
    index = index_of(storage, KeepLast(1))

    def unlink(path: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        assert list(index.remove([2])) == [2]
    assert 2 in index.steps() and verify(f"{storage.root}/2").step == 2
    assert not index.remove([2]) and not has_record(storage, "2")


def test_queued_deletions_hold_no_files_open(storage: LocalStorage) -> None:
    """A new keep policy over many steps does not take the program's descriptors."""
    steps = range(10, 60)
    for step in steps:
        shutil.copytree(f"{storage.root}/1", f"{storage.root}/{step}")
    worker = BackgroundWorker()
    gate = threading.Event()
    worker.put("holding the queue", lambda: gate.wait(60))
    index = index_of(storage, KeepAll(), worker)
    assert index.remove(steps) == {} and open_below(storage) == []
    gate.set()
    assert worker.wait(60) and open_below(storage) == [] and index.steps() == [1, 2, 3, 4]
    assert not any(os.path.exists(f"{storage.root}/{step}") for step in steps)


def open_below(storage: LocalStorage) -> list[str]:
    """Returns the files of the root that this process has open."""
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by whoever had it
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in held if path.startswith(storage.root)]


def test_a_step_that_cannot_be_deleted_stays_listed(storage: LocalStorage) -> None:
    """A store that refuses leaves the step in the index, so that a later save tries again; other
    steps go.
    """

    class Refusing(LocalStorage):
        def delete(self, names: list[str]) -> None:  # type: ignore[override]
            if "2/checkpoint.json" in names:
                raise OSError(13, "Permission denied")
            super().delete(names)

    worker = BackgroundWorker()
    index = index_of(Refusing(storage.root), KeepAll(), worker)
    assert (
        list(index.remove([1, 2, 3])) == [2]
        and index.steps() == [2, 4]
        and has_record(storage, "2")
    )
    assert worker.wait(60)
    assert open_below(storage) == [], "a record's bytes are still held"


def test_a_damaged_step_is_deleted_on_request(storage: LocalStorage) -> None:
    """Where the record does not read, the files that are named like ours go, and others stay."""
    worker = BackgroundWorker()
    index = index_of(storage, KeepLast(1), worker)
    Path(f"{storage.root}/1/checkpoint.json").write_text("{}")
    Path(f"{storage.root}/1/state/notes.txt").write_text("mine")
    assert index.superfluous(StepFacts(5)) == [2, 3, 4]
    assert index.remove([1]) == {} and worker.wait(60)
    assert [path.name for path in Path(f"{storage.root}/1/state").iterdir()] == ["notes.txt"]


def test_an_undeletable_step_is_a_typed_error(tmp_path: Path) -> None:
    """It names the step, says why and what to do, and the step is still there."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()
        (tmp_path / "1").rename(tmp_path / "elsewhere")
        (tmp_path / "1").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
        with pytest.raises(
            CheckpointError,
            match=(
                r"step 1 of .* could not be deleted and is still there: .*link.*then delete it"
                r" again"
            ),
        ) as caught:
            manager.delete(1)
        assert caught.value.step == 1 and (tmp_path / "elsewhere" / "checkpoint.json").exists()

"""What an unclear answer to a commit may mean: a record that has its name is never robbed of its
packs, nor is the one before it lost.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CommitUnknown,
    Options,
    SaveCancelled,
    SaveFailed,
    StepExists,
    load,
    register_storage,
    save,
    verify,
)
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.saving.stager import Cancellation
from holdfast.checkpoint.step_catalog import StepCatalog
from holdfast.checkpoint.steps.lineage import Position
from holdfast.checkpoint.storage import local
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.storage.tombstone import RECORD_NAME
from holdfast.checkpoint.tools.convert import convert
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups
from tests.support.told_stores import told_url

OLD = {"x": np.arange(3.0)}
NEW = {"x": np.arange(3.0) + 10}


@contextmanager
def _failing_sync(monkeypatch: pytest.MonkeyPatch, times: int) -> Iterator[None]:
    """Lets the fsync of a folder that holds a record fail with EIO, after the record has got its
    name.
    """
    real = local.sync_folder
    spared = [times]

    def sync(folder: Path) -> None:
        if (folder / "checkpoint.json").exists() and spared[0]:
            spared[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(local, "sync_folder", sync)
        yield


@contextmanager
def _done_and_answered(monkeypatch: pytest.MonkeyPatch, call: str, answer: int) -> Iterator[None]:
    """Lets link() or rename() do its work and then fail, as an NFS client does whose first answer
    was lost: with EEXIST, or with ENOENT.
    """
    real = getattr(os, call)

    def answered(source: Any, target: Any, **more: Any) -> None:
        real(source, target, **more)
        if str(target).endswith("checkpoint.json"):
            raise OSError(answer, os.strerror(answer), str(source), None, str(target))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, answered)
        yield


def _one_shot(path: Path | str, state: Any, overwrite: bool = False) -> None:
    save(path, state, overwrite=overwrite)


def _managed(path: Path | str, state: Any, overwrite: bool = False) -> None:
    root, _, step = str(path).rpartition("/")
    with CheckpointManager(root) as manager:
        manager.save(int(step), state, overwrite=overwrite).wait()


def _converted(path: Path, state: Any, overwrite: bool = False) -> None:
    source = path.parent.parent / "source"
    if not source.exists():
        save(source, state, step=int(path.name))
    convert(open_checkpoint(source), StorePath(open_storage(path.parent)), "holdfast")


WRITERS = [_one_shot, _managed, _converted]


@pytest.mark.parametrize("times", [1, 2, 1000])
@pytest.mark.parametrize("write", WRITERS)
def test_an_error_after_the_record_has_its_name_deletes_nothing(
    write: Callable[..., None], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO of the folder's fsync: the save is not known to be durable, and what is there is
    whole.
    """
    path = tmp_path / "root" / "7"
    path.parent.mkdir()
    if write is _converted:
        save(tmp_path / "source", NEW, step=7)
    with _failing_sync(monkeypatch, times), pytest.raises(CheckpointError) as caught:
        write(path, NEW)
    assert isinstance(caught.value, CommitUnknown), caught.value
    assert load(path)["x"].tolist() == [10, 11, 12]
    verify(path)


def test_a_commit_without_an_answer_is_known_once_its_number_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, or until the next opening, no process lists it; all know the same throughout."""

    def saves(group: Group) -> list[list[int]]:
        with CheckpointManager(tmp_path, group=group) as manager:
            with pytest.raises(CommitUnknown):
                manager.save(7, NEW).wait()
            group.barrier("unknown", timeout_s=60)
            known = [manager.all_steps()]
            with pytest.raises(StepExists, match="holds a checkpoint already"):
                manager.save(7, OLD).wait()
            known.append(manager.all_steps())
            manager.save(8, NEW).wait()
            return [*known, manager.all_steps()]

    with groups(2) as both, _failing_sync(monkeypatch, 1):
        found = at_once([lambda group=group: saves(group) for group in both])
    assert found == [[[], [7], [7, 8]]] * 2
    assert load(tmp_path / "7")["x"].tolist() == [10, 11, 12]


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("write", [_one_shot, _managed])
def test_an_overwrite_that_ends_unclear_keeps_one_of_the_two(
    write: Callable[..., None], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overwrite=True the old checkpoint goes only once the new one is known to be there."""
    path = tmp_path / "root" / "7"
    write(path, OLD)
    with _failing_sync(monkeypatch, times), pytest.raises(CommitUnknown):
        write(path, NEW, overwrite=True)
    assert load(path)["x"].tolist() in ([0, 1, 2], [10, 11, 12])
    verify(path)


@pytest.mark.parametrize(
    "answer", [errno.EEXIST, errno.ENOENT, errno.ENOSPC], ids=errno.errorcode.get
)
@pytest.mark.parametrize("write", WRITERS)
def test_an_error_for_our_own_link_is_a_success(
    write: Callable[..., None], answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit whose answer was lost is settled by looking whose file has the name."""
    path = tmp_path / "root" / "7"
    path.parent.mkdir()
    if write is _converted:
        save(tmp_path / "source", NEW, step=7)
    with _done_and_answered(monkeypatch, "link", answer):
        write(path, NEW)
    assert load(path)["x"].tolist() == [10, 11, 12]


@pytest.mark.parametrize("answer", [errno.ENOENT, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("write", [_one_shot, _managed])
def test_an_error_for_our_own_rename_is_a_success(
    write: Callable[..., None], answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is an overwrite: its packs are not deleted for an ENOENT of its own doing."""
    path = tmp_path / "root" / "7"
    write(path, OLD)
    with _done_and_answered(monkeypatch, "rename", answer):
        write(path, NEW, overwrite=True)
    assert load(path)["x"].tolist() == [10, 11, 12]


class _UnreadOnce:
    """A store whose records cannot be read, with ESTALE, while the first pack alone is written."""

    def __init__(self) -> None:
        self.packs = 0

    def __call__(self, verb: str, name: str, end_s: float) -> None:
        self.packs += verb == "write" and "/state/" in f"/{name}"
        if verb == "fetch" and name.endswith(RECORD_NAME) and self.packs == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)


@pytest.mark.parametrize("write", [_one_shot, _managed])
def test_a_look_that_fails_before_an_overwrite_is_a_failed_save(
    write: Callable[..., None], tmp_path: Path
) -> None:
    """The record that would be replaced cannot be read: nothing was tried, so that is known. What
    was written goes.
    """
    path = tmp_path / "root" / "7"
    write(path, OLD)
    before = sorted((path / "state").iterdir())
    with pytest.raises(SaveFailed, match="Stale file handle") as caught:
        write(told_url(path, _UnreadOnce()), NEW, overwrite=True)
    assert caught.value.passes
    assert load(path)["x"].tolist() == [0, 1, 2]
    assert sorted((path / "state").iterdir()) == before
    verify(path)


def test_a_look_that_fails_before_an_overwrite_is_a_miss(tmp_path: Path) -> None:
    """Where misses are allowed the job goes on, and the next save replaces the step."""
    _managed(tmp_path / "root" / "7", OLD)
    url = told_url(tmp_path / "root", _UnreadOnce())
    with CheckpointManager(url, options=Options(on_save_error="warn")) as manager:
        manager.save(7, NEW, overwrite=True)
        manager.save(7, NEW, overwrite=True)
        manager.wait_until_finished()
        assert manager.statistics()["saves_missed"] == 1
        assert manager.restore(7)["x"].tolist() == [10, 11, 12]


def test_a_folder_that_cannot_be_made_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without packs gets its folder with its record. Where that folder is not known to be
    durable, nothing was linked.
    """
    real = local.sync_folder
    root = tmp_path / "root"

    def sync(folder: Path) -> None:
        if Path(folder) == root and (root / "7").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        real(folder)

    with CheckpointManager(root) as manager:
        monkeypatch.setattr(local, "sync_folder", sync)
        with pytest.raises(SaveFailed, match="Input/output error"):
            manager.save(7, {"epoch": 3}).wait()
        monkeypatch.undo()
        assert manager.all_steps() == []


class _ClaimsUnread(BucketStorage):
    """A bucket that does not let a claim be read: what a commit looks at first."""

    def get(self, name: str) -> tuple[bytes | None, bytes]:
        if name.endswith("claim.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return super().get(name)


def test_a_look_that_fails_before_a_conditional_write_is_a_failed_save() -> None:
    """A bucket's commit looks at the claim first; where it cannot, nothing was written."""
    register_storage("unread", lambda url, _: _ClaimsUnread(url.replace("unread", "memory")))
    with CheckpointManager("unread://looks/before") as manager:
        with pytest.raises(SaveFailed, match="Permission denied"):
            manager.save(7, NEW).wait()
        assert manager.all_steps() == []


def test_eexist_for_anothers_link_is_step_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that is there is another writer's: it stays, whole, and ours is refused."""
    path = tmp_path / "root" / "7"
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(7, NEW)  # its existence was looked for before
        with monkeypatch.context() as patch:
            patch.setattr(StepCatalog, "place_of", lambda *_, **__: Position())
            manager.wait_until_finished()
            manager.save(7, OLD)
            with pytest.raises(StepExists, match="meanwhile"):
                manager.wait_until_finished()
    assert load(path)["x"].tolist() == [10, 11, 12]
    verify(path)


def test_the_first_of_cancel_and_close_decides() -> None:
    """A cancel before the close is in time, however often it is called, and the close raises; one
    after it is not.
    """
    early = Cancellation()
    late = Cancellation()
    early.check(3, 1)
    assert early.cancel() and early.cancel()
    for raises in (early.check, early.close):
        with pytest.raises(SaveCancelled, match="step 3 was not saved: process 1 called it off"):
            raises(3, 1)
    assert early.cancel()
    late.close(3, 1)
    late.close(3, 1)
    assert not late.cancel() and not late.cancel()
    late.check(3, 1)

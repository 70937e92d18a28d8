"""The steps of a root as its manager shows them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    KeepLast,
    Options,
    StepExists,
    StepNotFound,
    register_storage,
    save,
)
from holdfast.checkpoint.steps.holds import take_hold
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import RECORD_NAME
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups
from tests.support.told_stores import told_url

STATE = {"w": np.arange(4.0)}


def test_the_store_is_listed_anew_when_alone(tmp_path: Path) -> None:
    """What another process saved meanwhile is listed; what is known without a look has it not."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE).wait()
        save(tmp_path / "2", STATE, step=2)
        catalog = manager._catalog
        assert (catalog.all_steps(), catalog.known_steps()) == ([1, 2], [1])
        assert catalog.has(2) and not catalog.is_local(1)
        manager.reload()
        assert catalog.known_steps() == [1, 2]


def test_steps_of_other_libraries_are_left_alone(tmp_path: Path) -> None:
    """They are listed and described, and neither replaced nor deleted."""
    save(tmp_path / "3", STATE, layout="orbax")
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3]
        assert manager.structure(3).items["default"].tree["w"].shape == (4,)
        for overwrite in (False, True):
            with pytest.raises(StepExists, match="written by another library; save another step"):
                manager.save(3, STATE, overwrite=overwrite)
        with pytest.raises(CheckpointError, match="holdfast deletes only its own"):
            manager.delete(3)
        assert manager.all_steps() == [3]


def test_a_missing_step_is_not_deleted(tmp_path: Path) -> None:
    """The error says what is there instead."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE).wait()
        with pytest.raises(StepNotFound, match=r"there is no step 2 in .*, which has \[1\]"):
            manager.delete(2)
        manager.delete(1)
        assert manager.all_steps() == [] and not (tmp_path / "1").exists()


def test_what_the_keep_policy_cannot_delete_stays_on_all(tmp_path: Path) -> None:
    """A step whose record does not go at the primary stays listed on all processes, and each
    deletion is answered for itself. It goes after a later save.
    """
    sticks = [True]

    def refuse(verb: str, name: str, end_s: float) -> None:
        if verb == "delete" and name == f"1/{RECORD_NAME}" and sticks:
            raise PermissionError(13, "Permission denied", name)

    url = told_url(tmp_path, refuse)

    def saves(group: Group) -> list[object]:
        listed: list[object] = []
        with CheckpointManager(url, group=group, keep_policy=KeepLast(2)) as manager:
            for step in (1, 2, 3):
                manager.save(step, STATE).wait()
            listed.append(manager.all_steps())
            with pytest.raises(CheckpointError, match="could not be deleted and is still there"):
                manager.delete(1)
            manager.delete(2)
            listed.append(manager.all_steps())
            with pytest.raises(StepNotFound, match="there is no step 2"):
                manager.delete(2)
            if group.index == 0:
                sticks.clear()
            manager.save(4, STATE).wait()
            return [*listed, manager.all_steps()]

    with groups(3) as all_of_them:
        found = at_once([lambda group=group: saves(group) for group in all_of_them])
    assert found == [[[1, 2, 3], [1, 3], [3, 4]]] * 3


def test_a_failed_deletion_is_everybodys(tmp_path: Path) -> None:
    """A step that the primary could not delete stays listed on all processes, which raise the
    error; deleted again, it is gone on all.
    """
    step = tmp_path / "root" / "1"

    def deletes(group: Group) -> list[object]:
        with CheckpointManager(tmp_path / "root", group=group) as manager:
            manager.save(1, STATE).wait()
            manager.save(2, STATE).wait()
            if group.index == 0:
                step.rename(tmp_path / "elsewhere")
                step.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
            with pytest.raises(CheckpointError, match="could not be deleted and is still") as error:
                manager.delete(1)
            listed = manager.all_steps()
            if group.index == 0:
                step.unlink()
                (tmp_path / "elsewhere").rename(step)
            manager.delete(1)
            return [error.value.step, error.value.path, listed, manager.all_steps()]

    with groups(3) as all_of_them:
        found = at_once([lambda group=group: deletes(group) for group in all_of_them])
    assert found == [[1, str(tmp_path / "root"), [1, 2], [2]]] * 3


def test_a_step_that_one_process_deletes_alone_puts_no_later_one_out_of_step(
    tmp_path: Path,
) -> None:
    """Who deletes another step than the primary waits in vain for its answer. What all delete after
    that is deleted, and what they list is made alike by the next save.
    """

    def deletes(group: Group) -> list[int]:
        options = Options(save_timeout_s=2)
        with CheckpointManager(tmp_path, group=group, options=options) as manager:
            for step in (1, 2, 3, 4):
                manager.save(step, STATE).wait()
            if group.index == 0:
                manager.delete(1)
            else:
                with pytest.raises(BarrierTimeout):
                    manager.delete(2)
            group.barrier("the wait is over", timeout_s=30)
            manager.delete(3)
            manager.save(5, STATE).wait()
            return manager.all_steps()

    with groups(2) as both:
        found = at_once([lambda group=group: deletes(group) for group in both])
    assert found == [[2, 4, 5]] * 2


def test_what_a_reader_holds_is_not_deleted_as_superfluous(tmp_path: Path) -> None:
    """It stays on all processes alike, and what is not there is no error. No mark stays behind."""

    def deletes(group: Group) -> list[object]:
        with CheckpointManager(tmp_path / "root", group=group) as manager:
            for step in (1, 2, 3):
                manager.save(step, STATE).wait()
            if group.index == 0:
                assert take_hold(LocalStorage(str(tmp_path / "root")), 2, "2", 60.0)
            return [manager.delete_unheld([1, 2, 7]), manager.all_steps()]

    with groups(2) as all_of_them:
        found = at_once([lambda group=group: deletes(group) for group in all_of_them])
    assert found == [[[1, 7], [2, 3]]] * 2
    assert len(list((tmp_path / "root" / ".holdfast" / "holds").iterdir())) == 1


class _ReadsNamed(CountingStorage):
    """A folder that notes which files were read."""

    def __init__(self, path: str, read: list[str]) -> None:
        super().__init__(LocalStorage(path), lambda done_bytes: None)
        self._names = read

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        self._names.append(name)
        return super().read(name, offset, buffers)


def test_the_latest_step_costs_no_look_at_the_older_ones(tmp_path: Path) -> None:
    """Nor where the newest folders hold no step, or one that was left behind."""
    read: list[str] = []
    register_storage("noted", lambda url, _: _ReadsNamed(url.partition("://")[2], read))
    with CheckpointManager(f"noted://{tmp_path}") as manager:
        for step in range(20):
            manager.save(step, STATE).wait()
        manager.restore(17)
        manager.save(18, STATE | {"w": np.zeros(4)}).wait()
        (tmp_path / "30").mkdir()
        read.clear()
        assert manager.latest_step() == 18
        assert {name.partition("/")[0] for name in read} <= {".holdfast", "30", "19", "18"}
        shutil.rmtree(tmp_path / "18")
        save(tmp_path / "25", STATE, step=25)
        assert manager.latest_step() == 25


@pytest.mark.parametrize("is_bucket", [False, True], ids=["folder", "bucket"])
def test_a_reader_that_comes_first_learns_how_steps_are_called(
    tmp_path: Path, is_bucket: bool
) -> None:
    """An evaluator may be there before the trainer has begun the root and said it."""
    where = f"memory://{tmp_path.name}-names" if is_bucket else str(tmp_path)
    readers = [CheckpointManager(where, options=Options(read_only=True)) for _ in range(4)]
    assert readers[0].all_steps() == []
    named = Options(step_format="checkpoint_{:08d}")
    with CheckpointManager(where, options=named) as writer:
        writer.save(3, STATE).wait()
        assert readers[0].latest_step() == 3 and readers[1].all_steps() == [3]
        readers[2].reload()
        for reader in readers:
            np.testing.assert_array_equal(reader.restore(3)["w"], STATE["w"])
            reader.close()

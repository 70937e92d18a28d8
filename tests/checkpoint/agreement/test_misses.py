"""Saves that fail and that no process raises: how many in a row, and which errors never are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Options,
    SaveFailed,
    StepExists,
    UnsupportedLeaf,
)
from holdfast.checkpoint.scheduling import scheduler
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    Fenced,
    StatusClient,
    Timeouts,
)
from holdfast.multihost import ClusterGroup, Group
from tests.support.checkpointing import at_once, groups

STATE = {"w": np.arange(100.0)}


class Disk:
    """The disk of all local stores, which is full while `error` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        write = LocalStorage.write

        def write_unless_full(storage: LocalStorage, *args: Any, **options: Any) -> Any:
            if self.error is not None:
                raise self.error
            return write(storage, *args, **options)

        monkeypatch.setattr(LocalStorage, "write", write_unless_full)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def open_root(folder: Path, group: Group | None = None) -> CheckpointManager:
    options = Options(on_save_error="warn", max_missed_saves=2)
    return CheckpointManager(folder, group=group, options=options)


def save(manager: CheckpointManager, step: int) -> None:
    """Saves a step, and waits without asking how it ended."""
    manager.save(step, STATE)
    while manager.is_saving_in_progress():
        manager._join_lanes()


def test_training_goes_on_until_there_are_too_many(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """Two misses are let pass, each in the log, and the third failure is raised; a save that
    succeeds begins the count anew.
    """
    caplog.set_level(logging.WARNING, "holdfast")
    with open_root(tmp_path) as manager:
        for first in (10, 20):
            disk.error = OSError(28, "No space left on device")
            for step in (first + 1, first + 2, first + 3):
                save(manager, step)
            with pytest.raises(SaveFailed, match=f"step {first + 3} was not saved: .*No space"):
                manager.check_for_errors()
            disk.error = None
            save(manager, first + 4)
            manager.check_for_errors()
        assert manager.all_steps() == [14, 24]
        counts = manager.statistics()
        assert (counts["saves_failed"], counts["saves_missed"], counts["saves"]) == (6, 4, 2)
    missed = [text for text in caplog.messages if "training goes on" in text]
    assert len(missed) == 4
    assert "missed 1 in a row, of at most 2; the next save tries again: step 11 was" in missed[0]
    assert "missed 2 in a row, of at most 2; the next save tries again: step 12 was" in missed[1]


def test_a_miss_that_is_the_last_save_is_raised_to_who_asks(tmp_path: Path, disk: Disk) -> None:
    """`wait`, `wait_until_finished` and `close` promise that the save is durable: they raise."""
    disk.error = OSError(5, "Input/output error")
    manager = open_root(tmp_path)
    handle = manager.save(1, STATE)
    with pytest.raises(SaveFailed, match="Input/output error"):
        manager.wait_until_finished()
    with pytest.raises(SaveFailed, match="Input/output error"):
        handle.wait()
    manager.save(2, STATE)
    with pytest.raises(SaveFailed, match="step 2 was not saved"):
        manager.close()


def test_the_save_of_a_preemption_is_raised(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No save comes after it that could try again."""
    for asked in ("reached_preemption", "ask_sync_point"):  # by the loop, and by the save
        monkeypatch.setattr(scheduler, asked, lambda step: step == 2)
    with open_root(tmp_path) as manager:
        disk.error = OSError(5, "Input/output error")
        save(manager, 1)
        manager.check_for_errors()
        assert manager.reached_preemption(2)
        save(manager, 2)
        with pytest.raises(SaveFailed, match="step 2 was not saved"):
            manager.check_for_errors()
        disk.error = None


@pytest.mark.parametrize(
    "raised",
    [Fenced("another writer has taken over"), StepExists("step 1 is there"), RuntimeError("odd")],
    ids=lambda error: type(error).__name__,
)
def test_what_does_not_pass_is_raised(tmp_path: Path, disk: Disk, raised: Exception) -> None:
    """Another writer, a step that exists, and a defect are no misses."""
    with open_root(tmp_path) as manager:
        disk.error = raised  # type: ignore[assignment]
        save(manager, 1)
        with pytest.raises((Fenced, StepExists, SaveFailed)):
            manager.check_for_errors()
        disk.error = None
        assert manager.statistics()["saves_missed"] == 0


def test_mistakes_of_the_caller_are_raised(tmp_path: Path, disk: Disk) -> None:
    """A leaf that cannot be saved, and a step that is there, raise in `save`."""
    with open_root(tmp_path) as manager:
        save(manager, 1)
        with pytest.raises(StepExists):
            manager.save(1, STATE)
        with pytest.raises(UnsupportedLeaf):
            manager.save(2, {"w": object()})
        assert manager.statistics()["saves_missed"] == 0


def test_those_who_watch_see_a_miss(tmp_path: Path, disk: Disk) -> None:
    """`holdfast status`, the page and the metrics have it, and how many there are in a row, until a
    save succeeds.
    """
    with CoordinationService.spawn(1) as service, StatusClient(service.address) as status:
        client = CoordinationClient(service.address, 0, timeouts=Timeouts(shutdown_s=20))
        client.connect()
        with open_root(tmp_path, ClusterGroup(client, 0, 1)) as manager:
            disk.error = OSError(28, "No space left on device")
            save(manager, 1)
            progress = status.status().tasks[0].progress
            assert progress.values["saves_missed"] == 1
            assert progress.trouble.startswith("missed 1 in a row, of at most 2; the next save")
            disk.error = None
            save(manager, 2)
            progress = status.status().tasks[0].progress
            assert (progress.values["saves_missed"], progress.trouble) == (0, "")
        client.shutdown()


def test_what_one_process_raises_in_save_is_raised_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails while a save is prepared has that call raise: nowhere is it a miss."""

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    with groups(2) as both:
        managers = at_once([lambda group=group: open_root(tmp_path, group=group) for group in both])
        monkeypatch.setattr(managers[1]._durable._stager, "stage", fail)

        def ends(manager: CheckpointManager) -> str:
            try:
                save(manager, 1)
                manager.check_for_errors()
            except (OSError, SaveFailed) as error:
                return str(error)
            return "it was let pass"

        theirs, mine = at_once([lambda each=each: ends(each) for each in managers])
        at_once([manager.close for manager in managers])
    assert mine == "[Errno 5] Input/output error"
    assert "process 1 failed: SaveFailed: OSError: [Errno 5] Input/output error" in theirs

"""The steps of a root: what is known of them, which the keep policy lets go, and that deleting them
is safe.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    HostileCheckpoint,
    KeepAll,
    KeepBest,
    KeepEverySeconds,
    KeepLast,
    KeepLatestFor,
    Options,
    StepExists,
    StepFacts,
)
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.format.step_folders import has_record, list_steps
from holdfast.checkpoint.options import Statistics
from holdfast.checkpoint.policy import KeepPolicy
from holdfast.checkpoint.step_catalog import StepCatalog
from holdfast.checkpoint.steps.background import BackgroundWorker
from holdfast.checkpoint.steps.index import StepIndex
from holdfast.checkpoint.steps.step_files import StepDeleter
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import sealed_json
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups

YEAR_S = 365 * 86400


def index_of(storage: LocalStorage, keep_policy: KeepPolicy) -> StepIndex:
    return StepIndex(storage, keep_policy, list_steps(storage))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """A root with steps 1 to 4, whose losses are 4, 1, 3, 2."""
    with CheckpointManager(tmp_path) as manager:
        for step, loss in enumerate([4, 1, 3, 2], 1):
            manager.save(step, {"w": np.full(10, step)}, metrics={"loss": loss})
    return LocalStorage(tmp_path)


def test_metrics_come_from_the_records_once(storage: LocalStorage) -> None:
    """The policy sees steps of an earlier manager with their metrics; a record that was read is not
    read again.
    """
    index = index_of(storage, KeepBest(1, "loss"))
    assert index.steps() == [1, 2, 3, 4] and 3 in index and 5 not in index
    assert index.superfluous(StepFacts(5, {"loss": 9})) == [1, 3, 4]
    for step in (1, 2, 3, 4):
        os.truncate(f"{storage.root}/{step}/checkpoint.json", 0)
    assert index.superfluous(StepFacts(5, {"loss": 0})) == [1, 2, 3, 4]
    assert index.steps() == [1, 2, 3, 4], "a decision changes nothing"


def test_times_come_from_the_records(storage: LocalStorage) -> None:
    """Steps of an earlier manager are as old as their records say."""
    newer_s = read_record(storage, "4").started_s + 3600
    assert index_of(storage, KeepLatestFor(60)).superfluous(StepFacts(5, started_s=newer_s)) == [
        1,
        2,
        3,
        4,
    ]
    assert index_of(storage, KeepLatestFor(7200)).superfluous(StepFacts(5, started_s=newer_s)) == []
    assert index_of(storage, KeepEverySeconds(600)).superfluous(
        StepFacts(5, started_s=newer_s)
    ) == [2, 3, 4]


def test_the_new_step_stays(storage: LocalStorage) -> None:
    """Also where it is older than others."""
    index = index_of(storage, KeepLast(1))
    assert index.superfluous(StepFacts(0)) == [1, 2, 3]
    assert index_of(storage, KeepAll()).superfluous(StepFacts(0)) == []


def test_removing_deletes_at_the_primary_alone(storage: LocalStorage) -> None:
    """The record goes at once, the packs in the background; a process that does not delete forgets
    the step all the same.
    """
    other = index_of(storage, KeepAll())
    assert (
        other.remove([1, 2]) == {}
        and other.steps() == [3, 4]
        and list_steps(storage) == [1, 2, 3, 4]
    )
    worker = BackgroundWorker()
    statistics = Statistics()
    deleter = StepDeleter(storage, worker, statistics)
    primary = StepIndex(storage, KeepAll(), list_steps(storage), deleter)
    assert primary.remove([1, 2]) == {} and not has_record(storage, "1")
    assert (
        worker.wait(60)
        and not os.path.exists(f"{storage.root}/1")
        and statistics.to_dict()["steps_deleted"] == 2
    )
    assert primary.remove([7]) == {}


def tree(step: int) -> dict[str, object]:
    return {"w": jnp.arange(100.0) + step, "n": np.full(3, step), "lr": 0.5, "step": step}


def files(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".holdfast" not in path.parts
    )


def test_the_keep_policy_deletes_after_the_commit(tmp_path: Path) -> None:
    """KeepLast(2) leaves two steps, and no file of the others; KeepBest keeps the best and the
    newest.
    """
    with CheckpointManager(tmp_path / "last", keep_policy=KeepLast(2)) as manager:
        for step in range(6):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 5]
    assert {name.split("/")[0] for name in files(tmp_path / "last")} == {"4", "5"}
    assert sorted(os.listdir(tmp_path / "last")) == [".holdfast", "4", "5"]
    with CheckpointManager(tmp_path / "best", keep_policy=KeepBest(1, "loss")) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            manager.save(step, tree(step), metrics={"loss": np.float32(loss)})
        manager.wait_until_finished()
        assert (
            manager.all_steps() == [1, 3]
            and manager.best_step() == 1
            and manager.best_step("loss", "max") == 3
        )
    with CheckpointManager(tmp_path / "best", keep_policy=KeepBest(1, "loss")) as manager:
        manager.save(4, tree(4), metrics={"loss": 0.5})
        manager.wait_until_finished()
        assert manager.all_steps() == [4] and manager.metrics(4) == {"loss": 0.5}


def test_the_best_step_is_one_of_the_line(tmp_path: Path) -> None:
    """Not one that was left behind, nor one that is damaged, nor one that another program deletes
    as it is asked for.
    """
    with CheckpointManager(tmp_path) as manager:
        for step, loss in ((100, 3.0), (200, 2.0), (300, 1.0)):
            manager.save(step, tree(step), metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step("loss") == 300
        manager.restore(200, tree(0))
        manager.save(250, tree(250), metrics={"loss": 2.5})
        manager.wait_until_finished()
        assert manager.left_steps() == [300] and manager.best_step("loss") == 200
        record = tmp_path / "200" / "checkpoint.json"
        text = record.read_text()
        record.write_text(text[:-9])
        assert manager.best_step("loss") == 250
        record.write_bytes(sealed_json({"format": "of tomorrow"}))
        with pytest.raises(HostileCheckpoint):
            manager.metrics(200)
        assert manager.best_step("loss") == 250
        record.write_text(text)
        listed = manager._catalog.line()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepCatalog, "line", lambda catalog: listed)
            with CheckpointManager(tmp_path) as other:
                other.delete(200)
            assert manager.best_step("loss") == 250


def test_a_clock_that_jumps_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year ahead, and right again, within one manager and between two: no step is older than a
    day.
    """
    clock = time.time
    jumps = [0, YEAR_S, -YEAR_S, 0]
    for life in range(2):
        with CheckpointManager(tmp_path, keep_policy=KeepLatestFor(86400)) as manager:
            for number, jump in enumerate(jumps):
                monkeypatch.setattr(time, "time", lambda jump=jump: clock() + jump)
                manager.save(len(jumps) * life + number, tree(0)).wait()
            assert manager.all_steps() == list(range(len(jumps) * (life + 1)))
    # Of one whose clock was ahead when it opened, then of some whose clock is right again.
    for step, ahead_s in ((8, YEAR_S), (9, 0), (10, 0)):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: clock() + ahead_s)
        with CheckpointManager(tmp_path, keep_policy=KeepLatestFor(2 * YEAR_S)) as manager:
            manager.save(step, tree(0)).wait()
    with CheckpointManager(tmp_path, keep_policy=KeepLatestFor(86400)) as manager:
        manager.save(11, tree(0)).wait()
        assert manager.all_steps() == list(range(12))


def test_a_policy_never_deletes_a_damaged_step(tmp_path: Path) -> None:
    """A record that does not read keeps its step where it is; foreign files and folders stay
    too.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree(1))
    (tmp_path / "1" / "checkpoint.json").write_text("{}")
    foreign = [
        "2/_CHECKPOINT_METADATA",
        "2/default/d/00000-00000-0123456789",
        "7/state/notes.txt",
        "notes/1",
        "3.tmp/x",
    ]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = files(tmp_path)
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        for step in (10, 11, 12):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 12]  # 2 is Orbax's
    assert [name for name in files(tmp_path) if not name.startswith("12/")] == before


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_policy_reads_is_as_it_was(count: int, in_order: bool, tmp_path: Path) -> None:
    """The records that a keep policy reads say nothing of what is known of their steps: one that
    was passed over may be saved again, and one that was left behind stays so.
    """
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 4, 5):
            manager.save(step, tree(step))
    pack = next((tmp_path / "5" / "state").iterdir())
    os.truncate(pack, pack.stat().st_size - 5)
    options = Options(out_of_order=not in_order)

    def goes_on(group: Group) -> list[object]:
        with CheckpointManager(
            tmp_path, group=group, keep_policy=KeepLast(9), options=options
        ) as manager:
            assert manager.restore(fallback=True)["step"] == 4
            manager.restore(1)
            manager.save(2, tree(2)).wait()
            left = manager.left_steps()
            manager.save(5, tree(50)).wait()
            return [left, manager.restore()["step"]]

    with groups(count) as all_of_them:
        found = at_once([lambda group=group: goes_on(group) for group in all_of_them])
    assert found == [[[4, 5] if in_order else [], 50]] * count


@pytest.mark.parametrize("damaged", ["record", "pack"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_passed_over_can_be_saved_again(damaged: str, count: int, tmp_path: Path) -> None:
    """A job that goes on from an older step comes to the damaged one again; without a fallback it
    stays an error to save it.
    """
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(3, step)})
    path = (
        tmp_path / "2" / "checkpoint.json"
        if damaged == "record"
        else next((tmp_path / "2" / "state").iterdir())
    )
    os.truncate(path, path.stat().st_size - 5)

    def goes_on(group: Group) -> list[float]:
        with CheckpointManager(tmp_path, group=group) as manager:
            with pytest.raises(StepExists):
                manager.save(2, {"w": np.full(3, 20)})
            manager.wait_until_finished()
            assert manager.restore(fallback=True)["w"][0] == 1
            manager.save(2, {"w": np.full(3, 20)})
            manager.wait_until_finished()
            with pytest.raises(StepExists):
                manager.save(2, {"w": np.full(3, 30)})
            manager.wait_until_finished()
            found: list[float] = manager.restore()["w"].tolist()
            return found

    with groups(count) as all_of_them:
        assert (
            at_once([lambda group=group: goes_on(group) for group in all_of_them])
            == [[20, 20, 20]] * count
        )
    assert len(list((tmp_path / "2" / "state").iterdir())) <= 2

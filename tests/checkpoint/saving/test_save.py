"""One save, from a staged request to its result: what is on disk and in the index when it returns,
and what a failure leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    CommitUnknown,
    KeepLast,
    Options,
    SaveFailed,
    StepExists,
    UnsupportedLeaf,
)
from holdfast.checkpoint.agreement import save_protocol as protocol
from holdfast.checkpoint.agreement.save_protocol import SaveResult, Superfluous
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.saving import commit, save
from holdfast.checkpoint.saving.save import StepSaver
from holdfast.checkpoint.saving.stager import OneSave
from holdfast.checkpoint.steps.claims import Writer, this_writer
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import Fenced
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups
from tests.support.step_savers import open_saver, stage


def made(
    folder: Path, group: Group | None = None, writer: Writer | None = None, **options: Any
) -> StepSaver:
    """Returns what saves for a manager that keeps two steps."""
    return open_saver(folder, group, writer, keep_policy=KeepLast(2), **options)


def staged(
    saver: StepSaver, step: int, counter: int = 1, *, overwrite: bool = False, value: int = 0
) -> OneSave:
    tree = {"w": np.arange(1000) + value, "step": step}
    return stage(saver, step, tree, counter, metrics={"loss": 1.0}, overwrite=overwrite)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[StepSaver]:
    context = made(tmp_path)
    yield context
    context.state.worker.wait(60)
    context.root.claims.fence(context.root.writer.id)


def test_all_is_up_to_date_when_it_returns(context: StepSaver) -> None:
    """The step is listed with its metrics, the superfluous one is not, and the statistics count
    them.
    """
    for counter, step in enumerate((1, 2, 3), 1):
        result = context.run(staged(context, step, counter))
        assert (
            result == SaveResult(result.key, after=Superfluous((1,) if step == 3 else ()))
            and result.key.step == step
        )
        assert step in context.state.index
    assert context.state.index.steps() == list_steps(context.root.storage) == [2, 3]
    assert read_record(context.root.storage, "3").metrics == {"loss": 1.0}
    found = context.state.statistics.to_dict()
    assert found["saves"] == 3 and found["save_bytes"] == 3 * 8000 and found["save_s"] > 0
    assert (
        context.state.worker.wait(60) and context.state.statistics.to_dict()["steps_deleted"] == 1
    )


def test_a_step_that_another_writer_saved_meanwhile(context: StepSaver, tmp_path: Path) -> None:
    """The first commit wins: the second is StepExists, changes nothing, and leaves none of its
    files.
    """
    with CheckpointManager(tmp_path) as other:
        other.save(1, {"w": np.zeros(3)})
    before = sorted(tmp_path.glob("1/**/*"))
    result = context.run(staged(context, 1))
    assert isinstance(result.error, StepExists) and "saved meanwhile; nothing was changed" in str(
        result.error
    )
    assert sorted(tmp_path.glob("1/**/*")) == before and 1 in context.state.index
    assert context.run(staged(context, 1, 2, overwrite=True)).error is None
    assert (
        len([*tmp_path.glob("1/state/*")]) == 1
        and read_record(context.root.storage, "1").writer_id == f"{context.root.writer.id}00000002"
    )


def test_a_writer_whose_claim_is_gone(context: StepSaver, tmp_path: Path) -> None:
    """A save by a fenced writer is Fenced, and leaves nothing."""
    context.root.claims.fence(context.root.writer.id)
    result = context.run(staged(context, 1))
    assert isinstance(result.error, Fenced) and not (tmp_path / "1").exists()


def test_a_process_that_is_broken_says_why(context: StepSaver, tmp_path: Path) -> None:
    """A request that cannot be saved fails with its cause, and is counted."""
    broken = UnsupportedLeaf("the leaf 'f' is a function", leaf="f")
    asked = context.new_save(1, 1)
    asked.broken = broken
    result = context.run(asked)
    assert (
        isinstance(result.error, SaveFailed)
        and result.error.__cause__ is broken
        and not (tmp_path / "1").exists()
    )
    assert (
        str(result.error)
        == "step 1 was not saved: process 0 failed: UnsupportedLeaf: the leaf 'f' is a function"
    )
    assert context.state.statistics.to_dict()["saves_failed"] == 1


def test_a_slow_save_is_not_committed(tmp_path: Path) -> None:
    """Past save_timeout_s the primary commits nothing, and says what was exceeded."""
    context = made(tmp_path, save_timeout_s=1e-9)
    result = context.run(staged(context, 1))
    assert str(result.error) == "step 1 was not saved: it took longer than save_timeout_s=1e-09"
    assert list_steps(context.root.storage) == [] and not (tmp_path / "1").exists()
    context.root.claims.fence(context.root.writer.id)


class _ClaimsOfABusyStore(LocalClaims):
    """Claims that are taken once and cannot be renewed."""

    def take(self, writer: Writer) -> None:
        raise OSError(5, "the store is busy")


def test_an_unrenewed_claim_loses_no_step(tmp_path: Path) -> None:
    """The step is saved and listed, the superfluous one goes, and the next save works: the claim is
    renewed after a later one.
    """
    first = made(tmp_path)
    busy = replace(first.root, claims=_ClaimsOfABusyStore(first.root.storage))
    context = replace(first, root=busy)
    for counter, step in enumerate((1, 2, 3), 1):
        assert context.run(staged(context, step, counter)).error is None
    assert context.state.index.steps() == [2, 3]
    context.state.worker.wait(60)
    first.root.claims.fence(first.root.writer.id)


def test_too_little_space_is_reported_first(tmp_path: Path) -> None:
    """A save larger than what is free fails with both numbers."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.broadcast_to(np.int8(0), 1)})
        manager.wait_until_finished()
        spare = save.SPARE_BYTES
        save.SPARE_BYTES = 1 << 60
        try:
            manager.save(2, {"w": np.zeros(100)})
            with pytest.raises(
                SaveFailed,
                match=r"step 2 needs 1,152,921,504,606,\d{3},\d{3} bytes, [\d,]+ are free",
            ):
                manager.wait_until_finished()
        finally:
            save.SPARE_BYTES = spare
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".holdfast", "1"]


def test_stuck_files_are_deleted_later(context: StepSaver, tmp_path: Path) -> None:
    """What a failed save could not delete goes with the next job of the background worker."""

    class StuckStorage(LocalStorage):
        stuck = True

        def delete(self, names: list[str]) -> None:  # type: ignore[override]
            if self.stuck:
                raise OSError(16, "busy")
            super().delete(names)

    storage = StuckStorage(tmp_path)
    stuck = replace(context, root=replace(context.root, storage=storage))
    request = staged(stuck, 1)
    context.root.claims.fence(
        context.root.writer.id
    )  # so that the commit fails, after the packs are written
    assert stuck.run(request).error is not None
    assert stuck.state.worker.wait(60) and len([*tmp_path.glob("1/state/*")]) == 1
    storage.stuck = False
    stuck.state.worker.put("something else", lambda: None)
    assert stuck.state.worker.wait(60) and not (tmp_path / "1").exists()


def test_who_receives_no_result_reads_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose primary is silent after the reports knows the step by its record; without one
    it cannot know.
    """
    monkeypatch.setattr(commit, "RESULT_WAIT_S", 0.1)
    with groups(2) as both:
        writer = this_writer()
        primary, follower = (made(tmp_path, group, writer, save_timeout_s=1) for group in both)

        def lead_without_a_result(counter: int) -> None:
            """Commits, as the primary does, and dies before it sends the result."""
            request = staged(primary, counter, counter)
            part = commit.EffectPerformer(request, save.SnapshotWork(request))
            protocol.drive(
                protocol.lead(request.key),
                lambda effect: None if isinstance(effect, protocol.Tell) else part.perform(effect),
            )

        _, result = at_once(
            [lambda: lead_without_a_result(1), lambda: follower.run(staged(follower, 1, 1))]
        )
        assert result is not None and result.error is None and 1 in follower.state.index

        def be_silent() -> None:
            both[0].gather(f"{staged(primary, 2, 2).messages}/report", b"", timeout_s=60)

        _, result = at_once([be_silent, lambda: follower.run(staged(follower, 2, 2))])
        assert (
            result is not None and isinstance(result.error, CommitUnknown) and not result.deletable
        )
        assert str(result.error).startswith(
            "whether step 2 was saved is not known: process 1 was not told how it ended: "
        )
        assert len([*tmp_path.glob("2/state/00001-*")]) == len(
            staged(follower, 2, 2).trees["state"].plan.own
        )
    primary.root.claims.fence(writer.id)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("store", "more"),
    [
        ("folder", {}),
        ("folder", {"incremental": True}),
        ("memory://in-place", {}),
        ("folder", {"on_save_error": "warn"}),
    ],
)
def test_saves_without_room_for_copies(store: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Whatever writes them, `save` returns once the caller's arrays are out, and later changes are
    in no file.
    """
    root = store if "://" in store else tmp_path / store
    state = {"w": np.zeros(1 << 20, np.float32), "v": np.arange(1 << 19), "n": 0}
    with CheckpointManager(root, options=Options(host_memory_bytes=1, **more)) as manager:
        for step in range(3):
            state["w"][:] = step
            state["n"] = step
            manager.save(step, state)
            state["w"][:] = -1
        manager.wait_until_finished()
        for step in range(3):
            found = manager.restore(step)
            assert (found["w"] == step).all() and found["n"] == step
            np.testing.assert_array_equal(found["v"], state["v"])

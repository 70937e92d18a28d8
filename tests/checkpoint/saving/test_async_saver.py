"""The save in flight: who waits for it, for how long, and to whom its error goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Options, Progress, SaveFailed
from holdfast.checkpoint.options import Statistics
from holdfast.checkpoint.policy import KeepAll
from holdfast.checkpoint.saving import async_saver
from holdfast.checkpoint.saving.async_saver import AsyncSaver
from holdfast.checkpoint.saving.save import SaveContext
from holdfast.checkpoint.saving.stager import SaveRequest, SaveStager
from holdfast.checkpoint.steps.claims import LocalClaims, this_writer
from holdfast.checkpoint.steps.garbage import BackgroundWorker
from holdfast.checkpoint.steps.index import StepIndex
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Solo


class Gate:
    """Holds a save at its first bytes until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, seen: Progress) -> None:
        self.entered.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def context(tmp_path: Path, gate: Gate) -> Iterator[SaveContext]:
    storage, worker, statistics = LocalStorage(tmp_path), BackgroundWorker(), Statistics()
    claims, writer = LocalClaims(storage), this_writer()
    claims.take(writer)
    index = StepIndex(storage, KeepAll(), (), worker, statistics, deletes=True)
    yield SaveContext(storage, Solo(), claims, writer, Options(progress=gate, save_timeout_s=30), index, worker, statistics)
    claims.fence(writer.id)


def staged(context: SaveContext, step: int) -> SaveRequest:
    request = SaveRequest(step, step, f"{context.writer.id}{step:08x}")
    return SaveStager(context.storage, context.group, context.options).stage(request, {"state": {"w": np.zeros(100)}}, None, None)


def test_a_save_is_busy_until_it_has_ended(context: SaveContext, gate: Gate) -> None:
    """`busy` and `join` follow the save in flight; a join that ends in time changes nothing; the next save runs on the same thread."""
    saver = AsyncSaver(context)
    assert not saver.busy() and saver.take_error() is None
    saver.join(0)
    saver.wait_for_snapshots()
    saver.start(staged(context, 1))
    assert gate.entered.wait(60) and saver.busy()
    saver.wait_for_snapshots()
    with pytest.raises(TimeoutError, match=r"the save of step 1 is still in flight after 0\.01 s"):
        saver.join(0.01)
    assert saver.busy() and saver.take_error() is None
    gate.opened.set()
    saver.join()
    assert not saver.busy() and saver.take_error() is None and 1 in context.index
    saver.start(staged(context, 2))
    saver.join()
    assert context.index.steps() == [1, 2]
    saver.close()
    saver.close()


def test_a_store_that_hangs_ends_the_wait(context: SaveContext, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time of its own a join ends after the save's time and what its result may take, and names step and store."""
    monkeypatch.setattr(async_saver, "RESULT_WAIT_S", -7.499)  # in all: 30 s - 4 * 7.499 s
    saver = AsyncSaver(context)
    saver.start(staged(context, 1))
    with pytest.raises(SaveFailed, match=rf"the save of step 1 hangs in the store {context.storage.root} for over 0\.004 s") as caught:
        saver.join()
    assert caught.value.step == 1
    gate.opened.set()
    saver.join(60)
    saver.close()


def test_an_error_is_given_out_once(context: SaveContext, gate: Gate) -> None:
    """The error of a save is the next call's, and nobody's after it; that of a broken request was raised by whoever broke it."""
    gate.opened.set()
    saver = AsyncSaver(context)
    (Path(context.storage.root) / "1").write_text("in the way")
    saver.start(staged(context, 1))
    saver.join()
    with pytest.raises(SaveFailed, match="step 1 was not saved"):
        saver.raise_error()
    saver.raise_error()
    saver.start(SaveRequest(2, 2, f"{context.writer.id}00000002", broken=ValueError("mine")))
    saver.join()
    assert saver.take_error() is None and context.statistics.to_dict()["saves_failed"] == 2
    saver.close()


def tree(step: int) -> dict[str, object]:
    return {"w": jnp.arange(100.0) + step, "step": step}


def test_a_failed_save_is_raised_at_the_next_call_and_blocks_nothing(tmp_path: Path) -> None:
    """Its step is never listed, the next save begins and succeeds, and nothing of the failed one stays."""
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "1").write_text("in the way")
        manager.save(1, tree(1))
        with pytest.raises(SaveFailed, match=r"step 1 was not saved: process 0 failed") as caught:
            manager.save(2, tree(2))
        assert caught.value.process == 0 and isinstance(caught.value.__cause__, OSError)
        assert caught.value.__notes__ == ["the save of step 2 was begun nevertheless"]
        manager.wait_until_finished()
        manager.check_for_errors()
        assert manager.latest_step() == 2 and manager.statistics()["saves_failed"] == 1
        (tmp_path / "1").unlink()
        manager.save(1, tree(1))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2] and manager.restore(1)["step"] == 1


def test_close_raises_what_failed_but_not_over_another_error(tmp_path: Path) -> None:
    """`close()` raises the failure of a save in flight; leaving the block by an exception carries it as a note."""
    (tmp_path / "1").write_text("in the way")
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree(1))
    with pytest.raises(SaveFailed):
        manager.close()
    manager.close()

    def leave() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, tree(1))
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        leave()
    assert "besides, a save failed" in caught.value.__notes__[0]

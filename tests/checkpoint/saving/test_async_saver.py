"""The save in flight: who waits for it, for how long, and to whom its error goes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    EveryNSteps,
    Options,
    Progress,
    SaveCancelled,
    SaveFailed,
    StepExists,
    UnsupportedLeaf,
)
from holdfast.checkpoint.agreement.save_protocol import SaveReport
from holdfast.checkpoint.saving import async_saver, snapshot
from holdfast.checkpoint.saving.async_saver import AsyncSaver
from holdfast.checkpoint.saving.save import SnapshotWork, StepSaver
from holdfast.checkpoint.saving.stager import OneSave
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import ClusterGroup, Group
from tests.support.checkpointing import at_once, groups, pooled_blocks
from tests.support.step_savers import open_saver, stage
from tests.support.told_stores import told_url


class Gate:
    """Holds a save at its first bytes until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, seen: Progress) -> None:
        self.entered.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def context(tmp_path: Path, gate: Gate) -> Iterator[StepSaver]:
    context = open_saver(tmp_path, progress=gate, save_timeout_s=30)
    yield context
    context.root.claims.fence(context.root.writer.id)


def staged(context: StepSaver, step: int) -> OneSave:
    return stage(context, step, {"w": np.zeros(100)}, step)


def test_a_save_is_busy_until_it_has_ended(context: StepSaver, gate: Gate) -> None:
    """`busy` and `join` follow the save in flight; a join that ends in time changes nothing; the
    next save runs on the same thread.
    """
    saver = AsyncSaver(context)
    assert not saver.busy() and saver.take_error() is None
    saver.join(0)
    saver.begin(staged(context, 1))
    assert gate.entered.wait(60) and saver.busy()
    with pytest.raises(TimeoutError, match=r"the save of step 1 is still in flight after 0\.01 s"):
        saver.join(0.01)
    assert saver.busy() and saver.take_error() is None
    gate.opened.set()
    saver.join()
    assert not saver.busy() and saver.take_error() is None and 1 in context.state.index
    saver.start(staged(context, 2))
    saver.join()
    assert context.state.index.steps() == [1, 2]
    saver.close()
    saver.close()


def test_a_store_that_hangs_ends_the_wait(
    context: StepSaver, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time of its own a join ends after the save's time and what its result may take, and
    names step and store.
    """
    monkeypatch.setattr(async_saver, "RESULT_WAIT_S", -7.499)  # in all: 30 s - 4 * 7.499 s
    saver = AsyncSaver(context)
    saver.start(staged(context, 1))
    with pytest.raises(
        SaveFailed,
        match=rf"the save of step 1 hangs in the store {context.root.where} for over 0\.004 s",
    ) as caught:
        saver.join()
    assert caught.value.step == 1
    gate.opened.set()
    saver.join(60)
    saver.close()


def test_arrays_wait_for_a_hanging_store_with_a_bound(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save` returns though its arrays wait on the device for a store that hangs: with the error
    that names store and step.
    """
    monkeypatch.setattr(async_saver, "RESULT_WAIT_S", -7.4)  # in all: 30 s - 4 * 7.4 s
    monkeypatch.setattr(snapshot, "_are_on_host", lambda plan, leaves: False)
    options = Options(host_memory_bytes=1, save_timeout_s=30)
    with CheckpointManager(tmp_path, options=options) as manager:
        real = LocalStorage.write

        def write(storage: LocalStorage, *arguments: Any) -> None:
            assert gate.opened.wait(20)
            real(storage, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "write", write)
            with pytest.raises(SaveFailed, match=r"step 1 hangs in the store .* for over 0\.4 s"):
                manager.save(1, tree(1))
            gate.opened.set()
            monkeypatch.setattr(async_saver, "RESULT_WAIT_S", 30)
            manager.wait_until_finished()
        assert manager.restore(1)["step"] == 1


def test_a_pack_leaves_while_another_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a network bytes are on their way before all arrays are copied, and `save` returns only
    when all are.
    """
    gate = Gate()
    gate.opened.set()
    make = snapshot._PackCopy._make
    copied: list[bool] = []

    def copy_after_bytes(copy: Any, chunk: Any) -> None:
        if chunk.shard.shard[0] == 1:
            assert gate.entered.wait(60)
        copied.append(True)  # before `make`, which may let `save` return
        make(copy, chunk)

    monkeypatch.setattr(snapshot._PackCopy, "_make", copy_after_bytes)
    state = {name: np.full(1 << 21, place, np.float32) for place, name in enumerate("ab")}
    with CheckpointManager("memory://leaves", options=Options(progress=gate)) as manager:
        manager.save(1, state)
        assert len(copied) == 2
        for array in state.values():
            array[:] = -1
        manager.wait_until_finished()
        found = manager.restore(1)
    assert (found["a"] == 0).all() and (found["b"] == 1).all()


def test_an_error_is_given_out_once(context: StepSaver, gate: Gate) -> None:
    """The error of a save is the next call's, and nobody's after it; that of a broken request was
    raised by whoever broke it.
    """
    gate.opened.set()
    saver = AsyncSaver(context)
    (Path(context.root.where) / "1").write_text("in the way")
    saver.start(staged(context, 1))
    saver.join()
    error = saver.take_error()
    assert isinstance(error, SaveFailed) and "step 1 was not saved" in str(error)
    assert saver.take_error() is None
    broken = context.new_save(2, 2)
    broken.broken = ValueError("mine")
    saver.start(broken)
    saver.join()
    assert saver.take_error() is None and context.state.statistics.to_dict()["saves_failed"] == 2
    saver.close()


def tree(step: int) -> dict[str, object]:
    return {"w": jnp.arange(100.0) + step, "step": step}


def test_the_next_call_raises_a_failure(tmp_path: Path) -> None:
    """Its step is never listed, the next save begins and succeeds, and nothing of the failed one
    stays.
    """
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
        manager.save(3, tree(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3] and manager.restore(3)["step"] == 3


@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(0)])
def test_close_raises_what_failed(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`close()` raises the failure of a save in flight; leaving the block by an exception carries
    it as a note, and tells it: the exception may be caught, or end the program without its notes.
    """
    (tmp_path / "1").write_text("in the way")
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree(1))
    with pytest.raises(SaveFailed):
        manager.close()
    manager.close()

    def leave() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, tree(1))
            raise error

    with pytest.raises(type(error)) as caught:
        leave()
    failed = f"a save to {tmp_path} failed: SaveFailed: step 1 was not saved: process 0 failed"
    assert caught.value.__notes__[0].startswith(f"besides, {failed}")
    assert [message.partition(": NotADir")[0] for message in caplog.messages] == [failed]


def test_a_failure_is_told_where_the_next_call_raises_another_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that goes on after it has heard of the earlier one as well."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree(1)).wait()
        (tmp_path / "2").write_text("in the way")
        manager.save(2, tree(2))
        with pytest.raises(StepExists) as caught:
            manager.save(1, tree(1))
    (message,) = caplog.messages
    assert message.startswith("an earlier save failed: SaveFailed: step 2 was not saved")
    assert caught.value.__notes__ == [f"besides, {message}"]


@pytest.mark.parametrize("asked", [{}, {"step": 3, "fallback": True}])
def test_a_restore_of_the_newest_waits_for_the_save_in_flight(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    """It is the newest, and the first of all steps too."""
    restored = threading.Event()
    options = Options(progress=lambda seen: restored.wait(0.2))
    with CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2):
            manager.save(step, tree(step))
            assert manager.restore(**asked)["step"] == step
        restored.set()


def test_a_handle_waits_for_its_step(tmp_path: Path) -> None:
    """It is done when the step is there; one that the policy skipped is false, done, and has
    nothing to wait for or to cancel.
    """
    with CheckpointManager(tmp_path, save_policy=EveryNSteps(2)) as manager:
        handle = manager.save(2, tree(2))
        skipped = manager.save(3, tree(3))
        handle.wait()
        assert (
            handle
            and handle.done()
            and handle.step == 2
            and manager.all_steps() == [2]
            and "committed" in repr(handle)
        )
        assert not handle.cancel() and manager.latest_step() == 2
        skipped.wait()
        skipped.on_commit(lambda step: pytest.fail(f"step {step} was skipped"))
        assert (
            not skipped
            and skipped.done()
            and not skipped.cancel()
            and skipped.step == 3
            and "skipped" in repr(skipped)
        )


def test_a_handle_raises_its_error_each_time(
    tmp_path: Path,
) -> None:
    """`wait` raises what made the save fail; then no later call of the manager does."""
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "1").write_text("in the way")
        handle = manager.save(1, tree(1))
        for _ in range(2):
            with pytest.raises(SaveFailed, match="step 1 was not saved: process 0 failed"):
                handle.wait()
        assert handle.done() and "failed" in repr(handle)
        manager.check_for_errors()


def test_a_handle_that_waits_too_long_says_so(tmp_path: Path, gate: Gate) -> None:
    """`wait(timeout_s)` raises TimeoutError, and the save goes on."""
    with CheckpointManager(tmp_path, options=Options(progress=gate)) as manager:
        handle = manager.save(1, tree(1))
        with pytest.raises(
            TimeoutError, match=r"the save of step 1 is still in flight after 0\.01 s"
        ):
            handle.wait(0.01)
        assert not handle.done() and "in flight" in repr(handle)
        gate.opened.set()
        handle.wait()
        assert manager.latest_step() == 1


def test_a_close_that_is_interrupted_loses_no_save(tmp_path: Path, gate: Gate) -> None:
    """Ctrl-C while `close` waits: the save keeps its claim, and the next `close` waits again."""
    manager = CheckpointManager(tmp_path, options=Options(progress=gate))
    manager.save(1, tree(1))
    main = threading.get_ident()

    def interrupt() -> None:
        def calls() -> set[str]:
            return {each.name for each in traceback.extract_stack(sys._current_frames()[main])}

        while not {"close", "join", "wait"} <= calls():
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    thread.join()
    gate.opened.set()
    manager.close()
    with CheckpointManager(tmp_path) as again:
        assert again.all_steps() == [1]


def test_callbacks_are_called_once_the_step_is_there(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """In order, with the step, before `wait` returns; one given later at once; never for a save
    that failed; what one raises is logged.
    """
    called: list[object] = []

    def look(step: int) -> None:
        called.append((step, (tmp_path / str(step) / "checkpoint.json").is_file()))
        handle.wait()  # of this very save

    with CheckpointManager(tmp_path, options=Options(progress=gate)) as manager:
        handle = manager.save(1, tree(1))
        handle.on_commit(look)
        handle.on_commit(called.append)
        assert gate.entered.wait(60) and not called
        gate.opened.set()
        handle.wait()
        assert called == [(1, True), 1]
        assert (
            "RuntimeError: what was given to on_commit waits for its own save, of step 1"
            in caplog.text
        )
        handle.on_commit(called.append)
        assert called == [(1, True), 1, 1]
        (tmp_path / "2").write_text("in the way")
        failed = manager.save(2, tree(2))
        failed.on_commit(called.append)
        with pytest.raises(SaveFailed):
            failed.wait()
        failed.on_commit(called.append)
        assert called == [(1, True), 1, 1]


def test_a_callback_may_not_wait_for_its_save(tmp_path: Path, gate: Gate) -> None:
    """What would wait for the save in flight is a RuntimeError at once, in a callback that is
    given late too; another manager's calls are not.
    """
    found: list[str] = []
    with (
        CheckpointManager(tmp_path / "b") as other,
        CheckpointManager(tmp_path / "a", options=Options(progress=gate)) as manager,
    ):

        def call(step: int) -> None:
            for refused in (
                lambda: manager.save(2, tree(2)),
                lambda: manager.delete(1),
                manager.restore,
                manager.reload,
                manager.close,
                manager.wait_until_finished,
            ):
                with pytest.raises(RuntimeError, match="given to on_commit of step 1") as caught:
                    refused()
                found.append(str(caught.value).partition("(")[0])
            other.save(len(found), tree(step)).wait()

        handle = manager.save(1, tree(1))
        handle.on_commit(call)
        gate.opened.set()
        handle.wait(60)
        handle.on_commit(call)
        names = ["save", "delete", "restore", "reload", "close", "wait_until_finished"]
        assert found == 2 * names and other.all_steps() == [6, 12]
        manager.save(2, tree(2)).wait(60)
        assert manager.all_steps() == [1, 2]


def test_a_cancelled_save_leaves_nothing(tmp_path: Path, gate: Gate) -> None:
    """`cancel` returns True: the step never is, its files are deleted, `wait` raises SaveCancelled,
    later calls of the manager do not.
    """
    with CheckpointManager(tmp_path, options=Options(progress=gate)) as manager:
        handle = manager.save(1, tree(1))
        assert gate.entered.wait(60) and handle.cancel() and handle.cancel()
        gate.opened.set()
        with pytest.raises(
            SaveCancelled,
            match="step 1 was not saved: process 0 called it off; nothing of it stays",
        ) as caught:
            handle.wait()
        assert caught.value.step == 1 and caught.value.process == 0
        manager.check_for_errors()
        assert manager.statistics()["saves_failed"] == 0
        assert manager.all_steps() == [] and not list(tmp_path.glob("1/**/*.safetensors"))
        manager.save(1, tree(1)).wait()
        assert manager.all_steps() == [1]


def test_a_late_cancel_stops_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last moment is that before the commit: a record that is built and parsed is not given its
    name any more.
    """
    with CheckpointManager(tmp_path) as manager:
        build = SnapshotWork.build
        handles = []
        in_time = []
        started = threading.Event()

        def build_late(work: SnapshotWork, reports: Sequence[SaveReport]) -> bytes:
            record = build(work, reports)
            assert started.wait(60)
            in_time.append(handles[0].cancel())
            return record

        monkeypatch.setattr(SnapshotWork, "build", build_late)
        handles.append(manager.save(1, tree(1)))
        started.set()
        with pytest.raises(SaveCancelled):
            handles[0].wait()
        assert in_time == [True] and manager.all_steps() == []


def _cancels(
    tmp_path: Path, group: ClusterGroup, gate: Gate, *, late: bool
) -> tuple[bool, BaseException | None, list[int]]:
    """Saves as one of two processes, of which the second calls the save off; returns what came of
    it there.
    """
    options = Options(progress=gate, per_process=lambda path: True, save_timeout_s=30)
    reported = threading.Event()
    gather = group.gather
    with CheckpointManager(tmp_path, group=group, options=options) as manager:
        group.gather = lambda *given, **more: (reported.set(), gather(*given, **more))[1]  # type: ignore[assignment,func-returns-value]
        handle = manager.save(1, {"w": np.zeros(100)})
        in_time = False
        error = None
        assert gate.entered.wait(60)
        if group.index:
            if late:
                gate.opened.set()
                assert reported.wait(60)
            in_time = handle.cancel()
            gate.opened.set()
        try:
            handle.wait()
        except SaveCancelled as caught:
            error = caught
        return in_time, error, manager.all_steps()


@pytest.mark.parametrize("late", [False, True])
def test_one_process_calls_a_save_off_for_all(tmp_path: Path, late: bool) -> None:
    """Before its report it does, and all are told who did; after it the step is saved on all."""
    with groups(2) as both:
        gates = [Gate(), Gate()]
        gates[0].opened.set()
        ends = at_once(
            [
                lambda group=group: _cancels(tmp_path, group, gates[group.index], late=late)
                for group in both
            ]
        )  # type: ignore[misc]
    assert ends[1][0] is not late
    for _, error, steps in ends:
        assert steps == ([1] if late else [])
        assert late or (isinstance(error, SaveCancelled) and error.process == 1)


def test_what_one_process_cannot_prepare_is_everybodys(tmp_path: Path) -> None:
    """The others learn which leaf it is, no later call raises it again where it was raised, and no
    step is there, also where nobody could prepare it.
    """

    options = Options(save_timeout_s=20)

    def work(group: Group) -> list[object]:
        with CheckpointManager(tmp_path, group=group, options=options) as manager:
            told: list[object] = []
            for step, bad in ((1, {1}), (2, {0, 1})):
                tree = {"w": object() if group.index in bad else np.arange(4)}
                try:
                    manager.save(step, tree).wait()
                except (SaveFailed, UnsupportedLeaf) as error:
                    told.append("the leaf 'w' is a" in str(error))
                manager.wait_until_finished()
            return [*told, manager.all_steps()]

    with groups(2) as both:
        found = at_once([lambda group=group: work(group) for group in both])
    assert found == [[True, True, []]] * 2


def test_a_failed_save_keeps_none_of_its_snapshot(tmp_path: Path) -> None:
    """Its error stays, until the next save takes its place, and the bytes go: nobody counts them
    any more.
    """

    def before(verb: str, name: str, end_s: float) -> None:
        if verb == "write" and name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    blocks = pooled_blocks()
    options = Options(on_save_error="warn")
    with CheckpointManager(told_url(tmp_path, before), options=options) as manager:
        handle = manager.save(1, {"w": np.zeros(1 << 18)})
        with pytest.raises(SaveFailed, match="No space left"):
            handle.wait()
        assert pooled_blocks() == blocks


def test_a_save_ends_where_no_memory_is_left_to_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error is raised, nobody waits in vain, and its thread serves the next save."""

    def before(verb: str, name: str, end_s: float) -> None:
        if verb == "write" and name.startswith("1/"):
            raise MemoryError

    def without_memory(_: BaseException | None) -> None:
        raise MemoryError

    with CheckpointManager(told_url(tmp_path, before)) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(async_saver, "clear_frames", without_memory)
            handle = manager.save(1, {"w": np.zeros(9)})
            with pytest.raises(SaveFailed):
                handle.wait(20)
            async_saver.settle(20)
            assert "has not ended" not in capsys.readouterr().err
        manager.save(2, {"w": np.zeros(9)}).wait(20)
        assert manager.all_steps() == [2]

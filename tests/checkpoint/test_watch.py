"""Evaluators: waiting for steps that another process saves, and holding them while they are
read.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    KeepAnyOf,
    KeepEvery,
    KeepLast,
    Options,
    ProgressBar,
    StepNotFound,
    iterate_steps,
    register_storage,
    wait_for_new_step,
)
from holdfast.checkpoint.steps.holds import HOLDS, add_hold, held_steps, hold
from holdfast.checkpoint.storage.base import Entry
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Watchdog
from tests.support.cluster import run_processes
from tests.support.paths import program
from tests.support.told_stores import told_url


def test_waiting_for_a_step(tmp_path: Path) -> None:
    """It returns the newest step that is newer than the one known; None when none comes in time;
    nothing need be there yet.
    """
    root = tmp_path / "later"
    assert wait_for_new_step(root, timeout_s=0) is None
    found: list[int | None] = []
    waiter = threading.Thread(target=lambda: found.append(wait_for_new_step(root, timeout_s=60)))
    waiter.start()
    with CheckpointManager(root) as manager:
        manager.save(3, {"w": np.ones(3)})
        manager.wait_until_finished()
        waiter.join()
        assert (
            found == [3]
            and wait_for_new_step(root, 3, timeout_s=0.01) is None
            and wait_for_new_step(root, 2) == 3
        )


def test_a_root_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """By the waits too, in the call or in the loop."""
    root = tmp_path / ("x" * 300)
    steps = iterate_steps(root, timeout_s=0)
    for wait in (lambda: wait_for_new_step(root, timeout_s=0), lambda: next(steps)):
        with pytest.raises(CheckpointError, match="x cannot be read: File name too long"):
            wait()


def test_a_step_in_use_is_not_deleted(tmp_path: Path) -> None:
    """The step that iterate_steps has yielded stays while the loop's body runs, whatever the keep
    policy says; then it goes.
    """
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()
        seen = []
        for step in iterate_steps(tmp_path, timeout_s=0):
            seen.append(step)
            if step == 1:
                for later in (2, 3):
                    manager.save(later, {"w": np.ones(3) * later})
                manager.wait_until_finished()
                assert manager.all_steps() == [1, 3] and np.all(manager.restore(1)["w"] == 1)
        assert seen == [1, 3]
        manager.save(4, {"w": np.ones(3)})
        manager.wait_until_finished()
        assert manager.all_steps() == [4] and not (tmp_path / HOLDS).exists()
        assert list(
            iterate_steps(tmp_path, after=1, timeout_s=0, skip_to_newest=False, hold_s=0)
        ) == [4]


def test_restore_can_hold_what_it_restores(tmp_path: Path) -> None:
    """`restore(hold_s=...)` keeps the step for so long; a hold whose time is over is forgotten."""
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()
        with CheckpointManager(tmp_path, options=Options(read_only=True)) as reader:
            reader.restore(hold_s=3600)
            manager.save(2, {"w": np.ones(3)})
            manager.wait_until_finished()
            assert reader.all_steps() == [1, 2]
    storage = LocalStorage(tmp_path)
    for entry in storage.list(HOLDS):
        storage.delete([entry.name])
    storage.write(f"{HOLDS}/2-5-1000000000-0a0b0c0d", 1, [(0, [memoryview(b"x")])])
    os.utime(tmp_path / HOLDS / "2-5-1000000000-0a0b0c0d", (1e9, 1e9))
    (tmp_path / HOLDS / "foreign").touch()
    add_hold(storage, 7, 100)
    assert held_steps(storage) == {7} and {
        entry.name.rpartition("/")[2][:1] for entry in storage.list(HOLDS)
    } == {"7", "f"}
    with hold(storage, 2, "2", 100) as is_held:
        assert is_held and held_steps(storage) == {2, 7}
    assert held_steps(storage) == {7}


def test_a_step_deleted_by_hand_is_not_found(tmp_path: Path) -> None:
    """`delete` deletes even a step that is held: then it is StepNotFound."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()
        manager.restore(1, hold_s=100)
        manager.delete(1)
        with pytest.raises(StepNotFound):
            manager.restore(1)


def test_the_bar_shows_nothing_without_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`Options(progress=ProgressBar())` is safe in a batch job: no terminal, no output."""
    with CheckpointManager(tmp_path, options=Options(progress=ProgressBar())) as manager:
        manager.save(1, {"w": np.ones(1000)})
    assert capfd.readouterr() == ("", "")


def test_a_loop_that_hangs_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a question about a step for `hang_timeout_s`, the stacks of this process are in its
    log; questions keep it quiet.
    """
    with CheckpointManager(tmp_path, options=Options(hang_timeout_s=30)) as manager:
        assert manager.should_save(1) and manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()
    assert not [record for record in caplog.records if "watchdog" in record.getMessage()]
    with CheckpointManager(tmp_path, options=Options(hang_timeout_s=0.1)):
        while not (
            said := [
                record.getMessage()
                for record in caplog.records
                if "watchdog" in record.getMessage()
            ]
        ):
            time.sleep(0.01)
    assert "watchdog of 0.1 s" in said[0] and "test_a_loop_that_hangs_is_reported" in said[0]


def test_a_wait_of_the_manager_is_no_hang(tmp_path: Path) -> None:
    """A save after another, a restore and `close` may take longer than `hang_timeout_s`."""
    hangs: list[int] = []

    def before(verb: str, name: str, end_s: float) -> None:
        if (verb, name) in slow:
            time.sleep(1.2)
            hangs.append(dog.hangs)

    slow = [("commit", f"{step}/checkpoint.json") for step in (1, 2, 3)]
    url = told_url(tmp_path, before)
    with CheckpointManager(url, options=Options(hang_timeout_s=0.5)) as manager:
        dog = manager._parts.watchdog
        assert isinstance(dog, Watchdog)
        for step in (1, 2):
            manager.save(step, {"w": np.ones(3)})
        manager.wait_until_finished()
        slow.append(("fetch", "1/checkpoint.json"))
        manager.restore(1)
        manager.save(3, {"w": np.ones(3)})
    assert hangs == [0] * 4


@pytest.mark.parametrize("how", ["end", pytest.param("drop", marks=pytest.mark.slow)])
def test_a_program_that_has_finished_is_no_hang(how: str, tmp_path: Path) -> None:
    """Neither a long save at its exit ends it, nor the watchdog of a manager that is gone."""
    arguments = [tmp_path, how]
    run_processes(program("manager_ends_watched"), 1, arguments=arguments)
    with CheckpointManager(tmp_path, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == [7]


def test_the_newest_beside_a_writer_is_no_older_than_its_listing(tmp_path: Path) -> None:
    """The newest step is deleted for a newer one between the listing and the look at its record:
    an evaluator gets the newer one, not an older one that is kept.
    """
    keep = KeepAnyOf(KeepLast(1), KeepEvery(1000))  # step 0 stays
    with CheckpointManager(tmp_path, keep_policy=keep) as writer:

        def save(step: int) -> None:
            writer.save(step, {"n": step})
            writer.wait_until_finished()
            writer._state.worker.wait(30)

        class Replacing(LocalStorage):
            def list(
                self, folder: str, *, recursive: bool = False, names_only: bool = False
            ) -> list[Entry]:
                found = super().list(folder, recursive=recursive, names_only=names_only)
                step = writer.latest_step()
                if folder == "" and step is not None and step < 5:
                    save(step + 1)
                return found

        save(0)
        save(1)
        register_storage("beside", lambda url, single_writer: Replacing(tmp_path))
        assert wait_for_new_step("beside://root", timeout_s=10) == 5


@pytest.mark.parametrize("timeout_s", [None, float("nan")])
def test_a_wait_has_a_bound(timeout_s: float, tmp_path: Path) -> None:
    """A time-out that is no number of seconds is refused with a sentence, and nothing is waited."""
    tmp_path.joinpath("root").mkdir()
    for wait in (
        lambda: wait_for_new_step(tmp_path / "root", timeout_s=timeout_s),
        lambda: next(iterate_steps(tmp_path / "root", timeout_s=timeout_s)),
    ):
        with pytest.raises(ValueError, match=rf"a timeout of {timeout_s}: expected a number of"):
            wait()

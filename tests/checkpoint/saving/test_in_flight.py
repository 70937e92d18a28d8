"""A save that was begun is held until it ends, and what is lost is told."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Options, SaveHandle, load, save_async
from holdfast.checkpoint.saving.async_saver import settle, tell_lost
from holdfast.checkpoint.storage.threads import Latch, run_side_by_side
from tests.support.processes import no_thread_can_be_started
from tests.support.told_stores import told_url

TREE = {"w": np.arange(8)}


class Gate:
    """A store's pace: a save goes on once it is opened, and fails where it is shut."""

    def __init__(self) -> None:
        self.reached = Latch()
        self._opened = Latch()
        self._is_shut = False

    def __call__(self, progress: object) -> None:
        if not self.reached.is_set():
            self.reached.set()
        assert self._opened.wait(60)
        if self._is_shut:
            raise OSError("no room")

    def open(self) -> None:
        self._opened.set()

    def shut(self) -> None:
        self._is_shut = True
        self._opened.set()


def _save_and_drop(root: Path, gate: Gate) -> weakref.ref[CheckpointManager]:
    manager = CheckpointManager(root, options=Options(progress=gate))
    manager.save(1, TREE)
    return weakref.ref(manager)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_manager_that_is_dropped_is_gone_and_its_save_is_not(tmp_path: Path) -> None:
    """Nothing but the save in flight is held: no frame of a caller's, and so no array of theirs.
    The claim stands until the save has ended.
    """
    gate = Gate()
    assert _save_and_drop(tmp_path, gate)() is None
    assert gate.reached.wait(60)
    with CheckpointManager(tmp_path) as other:
        assert not other.all_steps()
        other._state.worker.wait(60)  # its sweep leaves what a living writer writes
        gate.open()
        settle()
        assert other.all_steps() == [1]
    assert np.array_equal(load(tmp_path / "1")["w"], TREE["w"])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_save_that_outlasts_the_wait_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its step: after exit_timeout_s, and after the time of the call where that is less."""
    gate = Gate()
    options = Options(progress=gate, exit_timeout_s=0.01)
    handle = CheckpointManager(tmp_path, options=options).save(1, TREE)
    settle()
    settle(0.02)
    gate.open()
    handle.wait()
    told = [f"the save of step 1 to {tmp_path} was in flight, and has not ended in 0.01 s"] * 2
    assert [message.partition(":")[0] for message in caplog.messages] == told


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("holds_handle", [False, True])
def test_a_failure_that_nobody_may_ask_for_is_told_once(
    holds_handle: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a manager that was dropped, whether its handle was or not; of one that is there the next
    call raises it.
    """
    gate = Gate()
    root = told_url(tmp_path, lambda verb, *_: gate(verb) if verb == "write" else None)
    handles: list[SaveHandle] = []

    def save() -> None:
        manager = CheckpointManager(root)
        handle = manager.save(1, TREE)
        if holds_handle:
            handles.append(handle)

    save()
    gate.shut()
    settle()
    (message,) = caplog.messages
    assert message.startswith(f"the save of step 1 to {tmp_path} failed: ") and "no room" in message


def test_what_is_lost_is_on_stderr_wherever_the_log_goes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, where the log goes there too."""
    with _log_to(logging.FileHandler(tmp_path / "log")):
        tell_lost("step 7 is lost")
    assert capfd.readouterr().err == "holdfast: step 7 is lost\n"
    assert "step 7 is lost" in (tmp_path / "log").read_text()
    with _log_to(logging.StreamHandler()):
        tell_lost("step 8 is lost")
    assert capfd.readouterr().err == "step 8 is lost\n"


@contextmanager
def _log_to(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
        handler.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_child_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    """Its thread is not there: the handle says at once whose the save is."""
    gate = Gate()
    with CheckpointManager(tmp_path, options=Options(progress=gate)) as manager:
        handle = manager.save(1, TREE)
        child = os.fork()
        if not child:
            code = 1
            try:
                settle()
                with pytest.raises(ValueError, match="belongs to the process that this one"):
                    handle.wait()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.open()
        handle.wait()


@pytest.fixture
def no_threads() -> Iterator[None]:
    """An interpreter that can start no thread, as one that ends cannot."""
    with no_thread_can_be_started():
        yield


@pytest.mark.usefixtures("no_threads")
def test_without_threads_a_save_is_done_by_its_caller(tmp_path: Path) -> None:
    """And all that it does side by side."""
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=print).start()
    assert run_side_by_side(lambda item: -item, [1, 2, 3], 2) == [-1, -2, -3]
    with CheckpointManager(tmp_path / "root") as manager:
        assert manager.save(1, TREE).done()
        manager.save(2, dict.fromkeys("abc", TREE["w"]))
        assert np.array_equal(manager.restore(2)["c"], TREE["w"])
    handle = save_async("memory://without-threads/x", TREE)
    assert handle.done() and handle.wait() is None
    assert np.array_equal(load("memory://without-threads/x")["w"], TREE["w"])
    assert threading.current_thread() is threading.main_thread()
    assert threading.current_thread().name == "MainThread"

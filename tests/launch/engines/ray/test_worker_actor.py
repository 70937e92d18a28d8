"""WorkerActor, which Ray would hold in a process of its own: here as a plain object, with real
processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch.engines.ray.worker_actor import Program, WorkerActor, WorkerUpdate
from holdfast.multihost import ProcessSpec
from tests.support.libraries import need
from tests.support.processes import wait_until, wait_until_ended

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="c:1", job_id="j", attempt=3)


@pytest.fixture
def actor() -> Iterator[WorkerActor]:
    held = WorkerActor()
    yield held
    held.kill()
    held._folder.cleanup()


def start(actor: WorkerActor, code: str, **extra: str) -> list[str]:
    return actor.start(Program([sys.executable, "-S", "-c", code], env=extra), SPEC)


def poll_to_the_end(actor: WorkerActor) -> tuple[list[str], WorkerUpdate]:
    """Returns all lines, and the update that has the exit code."""
    lines: list[str] = []
    while True:
        update = actor.poll(30.0)
        lines += update.lines
        if update.code is not None:
            return lines, update


def test_lines_come_before_the_exit_code(
    actor: WorkerActor,
) -> None:
    """The environment has the spec and what was given beside it; a stale slice is named; a command
    has no outcome.
    """
    code = (
        "import os, sys; print(os.environ['HOLDFAST_PROCESS_ID'], os.environ['EXTRA']);"
        " print('more'); sys.exit(4)"
    )
    lines = start(actor, code, EXTRA="x", MEGASCALE_SLICE_ID="2")
    assert lines == ["MEGASCALE_SLICE_ID: '2' -> removed, the job has one slice"]
    assert actor.pid() == os.getpid()
    printed, update = poll_to_the_end(actor)
    assert (printed, update.code, update.outcome) == (["1 x", "more"], 4, None)


def test_without_an_update_a_poll_ends_in_time(actor: WorkerActor) -> None:
    """Nothing new is an update without lines; the next one has what came since."""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15})"
    start(actor, f"{block}; print('up', flush=True); signal.sigwait({{15}}); print('notified')")
    first: tuple[str, ...] = ()
    while not first:
        first = actor.poll(30.0).lines
    assert first == ("up",) and actor.poll(0.01) == WorkerUpdate(())
    actor.signal(signal.SIGTERM)
    lines, update = poll_to_the_end(actor)  # its end may come with the line, or after it
    assert (lines, update.code) == (["notified"], 0)


@pytest.mark.parametrize("name", ["there", "not there"])
def test_it_runs_in_the_folder_of_its_caller(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this machine has none of that path, it runs where the actor is."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    held = WorkerActor(str(tmp_path / name))
    start(held, "import os; print(os.getcwd())")
    where = tmp_path / name if name == "there" else tmp_path
    assert poll_to_the_end(held)[0] == [str(where)]
    held._folder.cleanup()


@pytest.mark.parametrize("pause_s", [0.005, 0.0])
def test_a_process_that_prints_on_and_on_holds_up_no_call(
    actor: WorkerActor, pause_s: float
) -> None:
    """A poll ends in its time, and with as many lines as an update may have: signals come after
    it. No line is lost.
    """
    start(
        actor,
        "import itertools, signal, sys, time; signal.signal(15, lambda *_: sys.exit(7))\n"
        f"for number in itertools.count(): print(number, flush=True); time.sleep({pause_s})",
    )
    updates: list[WorkerUpdate] = []

    def polls() -> None:
        updates.extend(actor.poll(0.3) for _ in range(3))

    polling = threading.Thread(target=polls, daemon=True)
    polling.start()
    polling.join(30)
    assert not polling.is_alive()
    assert all(len(update.lines) <= 1_000 for update in updates)
    actor.signal(signal.SIGTERM)
    lines, update = poll_to_the_end(actor)
    assert update.code == 7
    printed = [line for update in updates for line in update.lines] + lines
    assert printed == [str(number) for number in range(len(printed))]


def test_kill_ends_the_process_and_what_it_started(actor: WorkerActor) -> None:
    """SIGKILL comes back as -9, and no process of its group is left."""
    start(
        actor,
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '600'],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)\ntime.sleep(600)",
    )
    lines: tuple[str, ...] = ()
    while not lines:
        lines = actor.poll(30.0).lines
    actor.kill()
    assert poll_to_the_end(actor)[1].code == -signal.SIGKILL
    assert wait_until_ended([int(lines[0])])


def test_before_a_start_there_is_nothing_to_end(actor: WorkerActor) -> None:
    """Signals to an actor that has started nothing are no errors."""
    actor.signal(signal.SIGTERM)
    actor.kill()
    assert actor.poll(0.01) == WorkerUpdate(())


@pytest.mark.slow
def test_a_pickled_call_leaves_its_outcome(actor: WorkerActor) -> None:
    """A call runs in a process of its own through the call runner, and its value comes with the
    exit code.
    """
    cloudpickle = need("ray.cloudpickle", "make slow-libraries")
    actor.start(Program(call=cloudpickle.dumps((max, (1, 5), {}))), SPEC)
    _, update = poll_to_the_end(actor)
    assert update.code == 0 and update.outcome is not None
    assert cloudpickle.loads(update.outcome) == ("value", 5)


def test_the_next_attempt_ends_what_is_left(actor: WorkerActor) -> None:
    """A second start kills a process that still runs; its last lines are told before those of the
    new one, and its end is not taken for that one's.
    """
    code = (
        "import os, signal; print(os.getpid(), flush=True);"
        " signal.pthread_sigmask(signal.SIG_BLOCK, {15}); print('asked', flush=True);"
        " signal.sigwait({15}); print('last', flush=True); signal.pause()"
    )
    start(actor, code)
    lines: list[str] = []
    while len(lines) < 2:
        lines += actor.poll(30.0).lines
    actor.signal(signal.SIGTERM)
    wait_until(lambda: not actor._updates.empty())
    start(actor, "print('second')")
    assert wait_until_ended([int(lines[0])])
    printed, update = poll_to_the_end(actor)
    assert (printed, update.code) == (["last", "second"], 0)

"""What the engines share: signals of the launcher, the order of events, and the run of a job."""

from __future__ import annotations

import dataclasses
import io
import signal
import time
from collections.abc import Sequence

import pytest

from holdfast.coordination import CoordinationClient, JobIdentity, ProcessLost
from holdfast.launch import LiveView, Preempted, RestartPolicy
from holdfast.launch.engines import base
from holdfast.launch.engines.base import BaseEngine
from holdfast.launch.supervisor.goodput import GoodputMeter
from holdfast.launch.supervisor.job import (
    Action,
    CoordinatorEnded,
    Decision,
    Exited,
    Job,
    Launch,
    Progressed,
    Rejoin,
    Replace,
    Reserve,
    Reserved,
    State,
    Stop,
    Tick,
)
from holdfast.launch.supervisor.ledger import Ledger
from holdfast.launch.workers.coordinator import Coordinator
from holdfast.launch.workers.output import ConsoleOutput
from holdfast.multihost import JobError
from tests.support.secured import at_once


class Recording(BaseEngine):
    """An engine whose processes end as soon as they are launched; it records what is done to
    them.
    """

    def __init__(self, output: ConsoleOutput, code: int = 0) -> None:
        super().__init__(output, RestartPolicy())
        self.done: list[object] = []
        self._code = code

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):
            self._queue.put(Reserved(action.attempt, action.max_processes))
        elif isinstance(action, Launch):
            self._lives = dict.fromkeys(range(action.num_processes), action.attempt)
            for process in range(action.num_processes):
                self._report_exit(Exited(action.attempt, process, self._code))

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        self.done.append(number)

    def _kill(self, processes: frozenset[int] | None = None) -> None:
        self.done.append("kill")

    def close(self) -> None:
        self.done.append("close")


class Rejoining(Recording):
    """An engine whose second process dies, and then, while the first is to join again, the
    coordinator.
    """

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Launch):
            everybody = frozenset({0, 1})
            self._queue.put(Progressed(action.attempt, restartable=everybody))
            self._queue.put(Exited(action.attempt, 1, -9))
        elif isinstance(action, Replace):
            self._queue.put(CoordinatorEnded(action.attempt, "the coordinator is gone"))
        else:
            super().carry_out(action)

    def _end_attempt(self, attempt: int, error: JobError) -> None:
        self.done.append((attempt, str(error)))


def output() -> ConsoleOutput:
    return ConsoleOutput(io.StringIO(), io.StringIO(), 2)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGINT, signal.SIGTERM),
        (signal.SIGINT, signal.SIGTERM, signal.SIGTERM),
    ],
)
def test_signals_stop_then_repeat_then_kill(numbers: tuple[signal.Signals, ...]) -> None:
    """The stop bears the signal's name; the later ones are no events. The first Ctrl-C after a
    SIGTERM is the first.
    """
    engine = Recording(output())
    for number in numbers:
        engine.forward(number)
    assert [engine.events(1.0) for _ in range(3)] == [[Stop(numbers[0].name)], [], []]
    assert engine.done == [signal.SIGTERM, "kill"]


def test_a_second_ctrl_c_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes at once is the same press, which a wrapper has passed on."""
    engine = Recording(output())
    for _ in range(2):
        engine.forward(signal.SIGINT)
    assert [engine.events(1.0) for _ in range(2)] == [[Stop("SIGINT")], []]
    assert engine.done == []
    monkeypatch.setattr(base, "SAME_PRESS_S", 0.0)
    engine.forward(signal.SIGINT)
    assert engine.events(1.0) == []
    assert engine.done == ["kill"]


def test_events_come_in_order() -> None:
    """What was queued first comes first; with nothing there the call returns at the latest after
    its timeout.
    """
    engine = Recording(output())
    engine.carry_out(Reserve(1, 1, 2))
    engine.carry_out(Launch(1, 2))
    assert [engine.events(0) for _ in range(4)] == [
        [Reserved(1, 2)],
        [Exited(1, 0, 0, met=-1)],
        [Exited(1, 1, 0, met=-1)],
        [],
    ]
    assert engine.events(0.01) == [] and engine.tasks() == ()


def test_the_coordinator_hears_of_an_exit_first() -> None:
    """When the event is queued, whoever waits for the process has been told how it ended."""
    coordinator = Coordinator("j", 1, 2)
    clients = [
        CoordinationClient(coordinator.address, index, job=JobIdentity(num_processes=2))
        for index in range(2)
    ]
    engine = Recording(output())
    engine._attempt = 1
    engine._lives = {1: 1}
    try:
        at_once([client.connect for client in clients])
        engine._open_watch(coordinator.address)
        engine._report_exit(Exited(1, 1, -9))
        while not isinstance(event := engine.events(10)[0], Exited):
            pass
        assert event == Exited(1, 1, -9, met=1)
        with pytest.raises(ProcessLost, match=r"process 1 .*ended by signal 9"):
            clients[0].wait_at_barrier("b", 1)
    finally:
        engine._close_watch()
        for client in clients:
            client.close()
        coordinator.close()


def test_an_exit_says_whether_all_may_have_met() -> None:
    """Not while the coordinator waits for one of them; they may have where it does not answer."""
    coordinator = Coordinator("j", 2, 2)
    engine = Recording(output())
    engine._attempt = 2
    engine._lives = {0: 1, 1: 1}
    engine._report_exit(Exited(1, 1, -9))
    assert engine.events(10) == [Exited(1, 1, -9, met=1)], "it has no coordinator yet"
    try:
        engine._open_watch(coordinator.address)
        engine._report_exit(Exited(1, 1, -9))
        assert engine.events(10) == [Exited(1, 1, -9, met=1)]
        coordinator.close()
        engine._report_exit(Exited(1, 0, -9))
        assert engine.events(10) == [Exited(1, 0, -9, met=2)]
    finally:
        engine._close_watch()
        coordinator.close()


def test_the_reasons_of_a_job_go_to_output() -> None:
    """A failure is written to the launcher's stream with its reason; a live view gets the engine's
    progress; handlers are given back.
    """
    before = signal.getsignal(signal.SIGTERM)
    view = LiveView(io.StringIO(), stderr := io.StringIO(), 2)
    engine = Recording(view, code=3)
    result = engine.run(Job("j", 2, 2), view)
    assert (result.outcome, result.exit_code, engine.done) == ("failed", 3, ["close"])
    assert (
        "holdfast: failed: process 0 of 2 ended with exit code 3 in attempt 1; 1 attempt, no step"
        in stderr.getvalue().splitlines()[-1]
    )
    assert view._tasks == engine.tasks and signal.getsignal(signal.SIGTERM) is before


def test_those_that_join_again_are_told_why_it_ends() -> None:
    """As those that run are: an attempt that they outlive is none that has ended."""
    engine = Rejoining(output())
    policy = RestartPolicy(max_failures=1)
    engine.run(Job("j", 2, 2, policy))
    (told,) = [each for each in engine.done if isinstance(each, tuple)]
    assert told[0] == 2 and "the coordinator is gone" in told[1]


def test_the_log_leaves_out_the_ordinary_course() -> None:
    """A first attempt that starts, runs and ends is not worth a line; a restart is, with its
    reason, and so is each state after it. How it ended is the last line, with its counts.
    """
    stderr = io.StringIO()
    engine = Recording(ConsoleOutput(io.StringIO(), stderr, 2))
    ledger = Ledger(GoodputMeter(0.0))
    job = Job("j", 2, 2)
    for state, attempt, error in (
        (State.SCHEDULING, 1, None),
        (State.RUNNING, 1, None),
        (State.RESTARTING, 1, None),
        (State.RUNNING, 2, None),
        (State.RUNNING, 2, None),
        (State.FAILED, 2, Preempted("drained")),
    ):
        following = dataclasses.replace(job, state=state, attempt=attempt, error=error)
        decision = Decision(following, (), f"why {state} {attempt}")
        ledger = ledger.observe(job, decision, Tick(), 0.0, 0.0)
        engine.observe(job, decision, ledger)
        job = following
    assert stderr.getvalue().splitlines() == [
        "holdfast: restarting: why restarting 1",
        "holdfast: running: why running 2",
    ]


class Broken(Recording):
    """An engine that cannot start what it is to start."""

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):
            super().carry_out(action)
        else:
            BaseEngine.carry_out(self, action)

    def _launch(self) -> None:
        raise OSError("no machine answers")

    def _leave_attempt(self, numbers_before: Sequence[int]) -> None:
        """It has had no coordinator."""

    def _rejoin(self, action: Rejoin) -> None:
        raise OSError("no machine answers")

    def _release(self) -> None:
        self.done.append("release")


def test_an_attempt_that_fails_to_start_is_over_at_once() -> None:
    """Nobody waits for the end of processes that were never there: those of a launch, and those
    that were to be new where the others stay.
    """
    policy = RestartPolicy(max_startup_failures=1, grace_s=60.0, backoff_s=0.0)
    engine = Broken(output())
    began = time.monotonic()
    result = engine.run(Job("j", 3, 3, policy))
    assert time.monotonic() - began < 30 and result.attempts == 2
    assert result.reasons[-1].startswith("attempt 2 could not start: OSError: no machine answers")
    engine = Broken(output())
    with pytest.raises(OSError, match="no machine"):
        engine.carry_out(Rejoin(7, 3, frozenset({1}), "process 0 has died"))
    ends = [event for _ in range(2) for event in engine.events(0)]
    assert ends == [Exited(7, 0, 127), Exited(7, 2, 127)]

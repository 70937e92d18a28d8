"""The loop between supervisor and engine, driven by an engine whose events a test has written
down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from holdfast.launch import RestartPolicy, StartupFailed, WorkerFailed
from holdfast.launch.supervisor.engine import supervise
from holdfast.launch.supervisor.job import (
    Action,
    Decision,
    Event,
    Exited,
    Job,
    Launch,
    Progressed,
    Release,
    Reserve,
    Reserved,
    State,
    Stop,
    Terminate,
)
from holdfast.launch.supervisor.ledger import Ledger


class Script:
    """An engine that answers each question for events with the next list; an empty one lets the
    time pass.
    """

    def __init__(self, *batches: Sequence[Event], fails_at: type[Action] | None = None) -> None:
        self.batches = list(batches)
        self.actions: list[Action] = []
        self.waits: list[float | None] = []
        self.now = 100.0
        self.closed = 0
        self._fails_at = fails_at

    def carry_out(self, action: Action) -> None:
        self.actions.append(action)
        if self._fails_at is not None and isinstance(action, self._fails_at):
            self._fails_at = None
            raise OSError("no port")

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        self.waits.append(timeout_s)
        if self.batches and (batch := self.batches.pop(0)):
            return batch
        assert timeout_s is not None, "the supervisor waits for ever and nothing will come"
        self.now += timeout_s
        return []

    def close(self) -> None:
        self.closed += 1

    def clock(self) -> float:
        return self.now


def job(num_processes: int = 2, **settings: float) -> Job:
    return Job("j", num_processes, num_processes, RestartPolicy(backoff_jitter=0.0, **settings))  # type: ignore[arg-type]


def test_a_good_end_closes_the_engine() -> None:
    """Reserve, launch, release, in this order; the result has the last progress, one attempt, and
    every reason on the way.
    """
    engine = Script([Reserved(1, 2)], [Progressed(1, 7, 5)], [Exited(1, 0, 0), Exited(1, 1, 0)])
    result = supervise(job(), engine, clock=engine.clock)
    assert engine.actions == [Reserve(1, 2, 2), Launch(1, 2), Release()]
    assert (result.outcome, result.exit_code, result.attempts, result.step, result.saved_step) == (
        "done",
        0,
        1,
        7,
        5,
    )
    assert engine.closed == 1 and result.error is None and not result.interrupted
    assert result.reasons == (
        "attempt 1 asks for 2 processes",
        "attempt 1 starts with 2 processes",
        "all 2 processes are done, attempt 1",
    )
    result.raise_for_outcome()


def test_each_decision_comes_with_the_job_before() -> None:
    """`on_decision` sees an unbroken chain from the first state to the last."""
    seen: list[tuple[Job, Decision]] = []
    engine = Script([Reserved(1, 1)], [Exited(1, 0, 0)])
    supervise(
        job(1),
        engine,
        on_decision=lambda before, decision, event, ledger: seen.append((before, decision)),
        clock=engine.clock,
    )
    assert [before for before, _ in seen[1:]] == [decision.job for _, decision in seen[:-1]]
    assert (seen[0][0].state, seen[-1][1].job.state) == (State.INITIALIZING, State.FINISHED)


def test_an_attempt_began_when_the_host_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock was set while the job ran, or the machine slept: no later attempt is told with the
    time that the launcher would have had.
    """
    seen: dict[int, float] = {}
    hours = iter(range(100))
    engine = Script([Reserved(1, 1)], [Exited(1, 0, 1)], [], [Reserved(2, 1)], [Exited(2, 0, 0)])

    def note(before: Job, decision: Decision, event: Event, ledger: Ledger) -> None:
        seen.update((attempt.number, attempt.began_unix_s) for attempt in ledger.attempts)

    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    result = supervise(job(1, max_failures=1), engine, on_decision=note, clock=engine.clock)
    assert (result.outcome, result.attempts) == ("done", 2)
    assert all(told % 3600 == 0 for told in seen.values()) and seen[1] < seen[2]


@pytest.mark.parametrize("action", [Reserve, Launch])
def test_a_start_that_raises_is_tried_again(action: type[Action]) -> None:
    """What an engine raises while it starts an attempt is a failed start with its text, decided
    upon before anything else.
    """
    batches = (
        [[Reserved(1, 1)], [], []] if action is Launch else []
    )  # what may run of an attempt is ended first
    engine = Script(*batches, [], [Reserved(2, 1)], [Exited(2, 0, 0)], fails_at=action)
    result = supervise(job(1), engine, clock=engine.clock)
    assert (result.outcome, result.attempts) == ("done", 2)
    assert any("attempt 1 could not start: OSError: no port" in reason for reason in result.reasons)


def test_starts_that_fail_too_often_end_the_job() -> None:
    """With no budget the first failure ends it, and `raise_for_outcome` raises it."""
    engine = Script(fails_at=Reserve)
    result = supervise(job(1, max_startup_failures=0), engine, clock=engine.clock)
    assert (result.outcome, engine.closed) == ("failed", 1)
    with pytest.raises(StartupFailed, match="attempt 1 could not start: OSError: no port"):
        result.raise_for_outcome()


def test_another_action_that_raises_is_a_bug() -> None:
    """Only starting may fail: what a release raises reaches the caller, after the engine was
    closed.
    """
    engine = Script([Reserved(1, 1)], [Exited(1, 0, 0)], fails_at=Release)
    with pytest.raises(OSError, match="no port"):
        supervise(job(1), engine, clock=engine.clock)
    assert engine.closed == 1


def test_the_engine_waits_until_the_next_wake() -> None:
    """No time while a job runs, the rest of the grace time while processes are being ended, then
    the back-off.
    """
    engine = Script(
        [Reserved(1, 2)],
        [Exited(1, 0, 1)],
        [],
        [],
        [],
        [Reserved(2, 2)],
        [Exited(2, 0, 0), Exited(2, 1, 0)],
    )
    result = supervise(job(max_failures=1, grace_s=4.0, backoff_s=2.0), engine, clock=engine.clock)
    assert engine.waits[:3] == [600.0, None, 4.0]
    assert result.outcome == "done" and Terminate(frozenset({1})) in engine.actions


def test_control_c_is_told_apart_from_other_stops() -> None:
    """A stop by SIGINT is an interruption, one by SIGTERM is not; both end as preempted, and the
    code is the one that the launcher ends with.
    """
    for name, interrupted, code in (("SIGINT", True, 130), ("SIGTERM", False, 75)):
        engine = Script([Reserved(1, 1)], [Stop(name)], [Exited(1, 0, 75)])
        result = supervise(job(1), engine, clock=engine.clock)
        assert (result.outcome, result.exit_code, result.interrupted) == (
            "preempted",
            code,
            interrupted,
        )
        assert result.summary == (
            f"preempted: the only process has left after notice from {name}; nothing is started"
            f" again; 1 attempt, no step reported, {result.elapsed_s:.1f} s, exit code {code}"
        )


def test_a_failure_without_budget_ends_the_job() -> None:
    """The error names the process; the outcome is "failed" with its exit code."""
    engine = Script([Reserved(1, 1)], [Exited(1, 0, 3)])
    result = supervise(job(1), engine, clock=engine.clock)
    assert (result.outcome, result.exit_code) == ("failed", 3)
    assert isinstance(result.error, WorkerFailed) and result.error.processes == (0,)


def test_the_result_accounts_for_all_time() -> None:
    """The parts of the goodput sum to the time that the job took."""
    engine = Script(
        [Reserved(1, 2)],
        [Exited(1, 0, 1)],
        [],
        [],
        [],
        [Reserved(2, 2)],
        [Exited(2, 0, 0), Exited(2, 1, 0)],
    )
    result = supervise(job(max_failures=1, grace_s=4.0, backoff_s=2.0), engine, clock=engine.clock)
    assert result.goodput.total_s == result.elapsed_s > 0 and result.goodput.ending_s > 0

"""The history of a job, and what the coordinator is told of it by its launcher."""

from __future__ import annotations

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.goodput import GoodputMeter
from holdfast.launch.supervisor.job import (
    Decision,
    Event,
    Exited,
    Job,
    Progressed,
    Reserved,
    Start,
    StartFailed,
    Stop,
    Tick,
)
from holdfast.launch.supervisor.ledger import MOST_ATTEMPTS, Errand, Ledger

NOTHING = Ledger(GoodputMeter(0.0))
ERRAND = Errand(["python", "my train.py"], "/home/me", 5.0)


def after(*events: Event) -> Decision:
    """Returns the last decision about a job of two processes; a second passes between two."""
    job = Job("j", 2, 2, RestartPolicy(max_failures=1))
    for now, event in enumerate(events):
        decision = decide(job, event, float(now))
        job = decision.job
    return decision


def test_the_command_is_as_a_shell_would_take_it() -> None:
    """With its folder and its beginning, in every state."""
    told = ERRAND.launcher(after(Start()), NOTHING)
    assert (told.command, told.folder) == ("python 'my train.py'", "/home/me")
    assert (told.began_unix_s, told.attempt, told.state) == (5.0, 1, "scheduling")


def test_missing_room_is_told_while_it_is_missing() -> None:
    """And no longer once there is enough."""
    waiting = ERRAND.launcher(after(Start(), Reserved(1, 1)), NOTHING)
    assert waiting.waiting_for == "room for 1 of at least 2 processes"
    there = ERRAND.launcher(after(Start(), Reserved(1, 1), Reserved(1, 2)), NOTHING)
    assert there.waiting_for == ""


def test_an_end_by_preemption_is_no_failure() -> None:
    """Both are final; what is to be done differs."""
    ends = [Exited(1, 0, 75), Exited(1, 1, 75)]
    stopped = ERRAND.launcher(after(Start(), Reserved(1, 2), Stop("SIGTERM"), *ends), NOTHING)
    assert stopped.state == "preempted"
    ended = after(Start(), Reserved(1, 2), Exited(1, 0, 0), Exited(1, 1, 0))
    done = ERRAND.launcher(ended, NOTHING)
    assert done.state == "finished"


def test_an_attempt_has_who_stayed_and_who_was_replaced() -> None:
    """The first has neither; one that did not come back in time was replaced after all."""
    ledger = NOTHING
    job = Job("j", 3, 3, RestartPolicy(max_failures=1, rejoin_timeout_s=10.0))
    events = [
        Start(),
        Reserved(1, 3),
        Progressed(1, 0, restartable=frozenset(range(3))),
        Exited(1, 1, -9),
    ]
    for now, event in enumerate(events):
        decision = decide(job, event, float(now))
        ledger = ledger.observe(job, decision, event, float(now), 100.0 + now)
        job = decision.job
    first, second = ledger.attempts
    assert (first.number, first.num_processes, first.stayed) == (1, 3, 0)
    assert (second.number, second.num_processes, second.stayed) == (2, 3, 2)
    assert (list(second.replaced), second.began_unix_s) == ([1], 103.0)
    assert "process 1 of 3 was ended by signal 9" in second.why
    assert ledger.outlived == {2}
    late = ledger.observe(job, decide(job, Tick(), 60.0), Tick(), 60.0, 160.0)
    assert (late.attempts[1].stayed, list(late.attempts[1].replaced)) == (0, [0, 1, 2])
    assert "process 1 of 3 was ended by signal 9" in ledger.reasons[-1]
    assert len(late.reasons) == len(ledger.reasons) + 1


def test_the_newest_attempts_are_kept() -> None:
    """Of a job that cannot start, too."""
    ledger = NOTHING
    policy = RestartPolicy(max_startup_failures=100, backoff_s=0.0)
    job = Job("j", 1, 1, policy)
    event: Event = Start()
    for now in range(100):
        decision = decide(job, event, float(now))
        ledger = ledger.observe(job, decision, event, float(now), 100.0 + now)
        job = decision.job
        event = Tick() if isinstance(event, StartFailed) else StartFailed(job.attempt, "no port")
    numbers = [attempt.number for attempt in ledger.attempts]
    assert numbers == list(range(job.attempt - MOST_ATTEMPTS + 1, job.attempt + 1))

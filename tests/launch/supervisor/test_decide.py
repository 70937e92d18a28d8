"""The decision function of the supervisor: what each event makes of a job, and what no sequence of
events can make of it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable

import pytest

from holdfast.launch import (
    Fatal,
    Hang,
    Preempted,
    RestartPolicy,
    StartupFailed,
    StartupTimeout,
    WorkerFailed,
)
from holdfast.launch.supervisor.decide import backoff_s, decide
from holdfast.launch.supervisor.job import (
    NO_SAVE,
    STUCK,
    Action,
    Capacity,
    CoordinatorEnded,
    Dismiss,
    Event,
    Exited,
    Grow,
    Job,
    Kill,
    Launch,
    Noticed,
    Notify,
    PrepareNext,
    Progressed,
    Rejoin,
    Release,
    Replace,
    Reserve,
    Reserved,
    SavePosition,
    Stalled,
    Start,
    StartFailed,
    State,
    Stop,
    Terminate,
    Tick,
    Unnotify,
    Unplaced,
    Waiting,
    Withdrawn,
)
from holdfast.multihost.group.group import SaveStage
from tests.model.decisions.promises import Step, check_step, check_way_out

POLICY = RestartPolicy(max_failures=2, max_preemptions=2, backoff_jitter=0.0)


class Run:
    """Drives the decision function with a clock that only the test turns."""

    def __init__(
        self, policy: RestartPolicy = POLICY, min_processes: int = 2, max_processes: int = 4
    ) -> None:
        self.job = Job("j", min_processes, max_processes, policy)
        self.now = 100.0
        self.actions: list[Action] = []
        self.reason = ""

    def handle(self, *events: Event) -> Run:
        self.actions = []
        for event in events:
            decision = decide(self.job, event, self.now)
            self.job = decision.job
            self.reason = decision.reason
            self.actions += decision.actions
        return self

    def wake(self) -> Run:
        assert self.job.wake_at is not None
        self.now = max(self.now, self.job.wake_at)
        return self.handle(Tick())

    def exit(self, codes: Iterable[int]) -> Run:
        actions: list[Action] = []
        for process, code in enumerate(codes):
            if not self.job.final:
                actions += self.handle(Exited(self.job.attempt, process, code)).actions
        self.actions = actions
        return self


def running(
    policy: RestartPolicy = POLICY,
    min_processes: int = 2,
    max_processes: int = 4,
    num_processes: int | None = None,
) -> Run:
    return (
        Run(policy, min_processes, max_processes)
        .handle(Start())
        .handle(Reserved(1, num_processes or max_processes))
    )


def test_a_job_runs_to_its_end() -> None:
    """Start asks for machines, a reservation launches, and the last exit code of 0 finishes and
    gives all back.
    """
    run = Run().handle(Start())
    assert run.actions == [Reserve(1, 2, 4)]
    assert run.handle(Reserved(1, 3)).actions == [Launch(1, 3)]
    assert run.handle(Exited(1, 0, 0), Exited(1, 2, 0)).job.state is State.RUNNING
    assert run.reason == "process 2 is done; 1 of 3 processes still runs"
    assert run.handle(Exited(1, 1, 0)).job.state is State.FINISHED
    assert run.actions == [Release()]


def test_a_death_restarts_all() -> None:
    """The rest, without a client of ours, gets SIGTERM, then SIGKILL after the grace time; the next
    attempt has a new number.
    """
    run = running().handle(Exited(1, 2, -9))
    assert run.job.state is State.RESTARTING
    assert run.actions == [Terminate(frozenset({0, 1, 3}))]
    assert (
        run.reason
        == "process 2 of 4 was ended by signal 9 in attempt 1; ending the 3 processes that are"
        " left, then again (1 of 2 max_failures)"
    )
    assert run.wake().actions == [Kill()]
    assert run.handle(Exited(1, 0, -9), Exited(1, 1, -9), Exited(1, 3, -9)).actions == [
        Release(),
        PrepareNext(2, 4),
    ]
    assert run.wake().actions == [
        Reserve(2, 2, 4)
    ]  # as soon as the back-off is over, in which the next one was prepared


def saving(*positions: SavePosition | None) -> Run:
    """Returns a run of four whose processes stand so in their saves; None: no client of ours."""
    return running().handle(
        Progressed(1, saves={process: at for process, at in enumerate(positions) if at is not None})
    )


WRITING, REPORTED, COMMITTING, SETTLED = (SavePosition(3, stage) for stage in SaveStage)


def test_a_job_that_makes_no_steps_hangs() -> None:
    """All are ended, and it begins again; without a budget its error is a Hang that names who and
    why, with exit code 124.
    """
    for failures in (1, 0):
        run = running(RestartPolicy(max_failures=failures, stall_timeout_s=30.0)).handle(
            Progressed(1, 7, saves=dict.fromkeys(range(4), NO_SAVE))
        )
        run.handle(Stalled(1, "no process has made a step for 31 s; process 2 is in f", (2,)))
        assert run.actions[0] == Kill(frozenset({0, 1, 2, 3}))
    assert run.job.exit_code == 124 and isinstance(error := run.job.error, Hang)
    assert str(error) == "attempt 1 hangs: no process has made a step for 31 s; process 2 is in f"
    assert (error.processes, error.timeout_s, error.knob) == ((2,), 30.0, "stall_timeout_s")


def test_a_save_waits_for_no_silent_process() -> None:
    """It holds its interpreter: had it not reported its share, all end at once; had it, it alone
    does, and the others commit.
    """
    run = saving(REPORTED, REPORTED, WRITING, REPORTED).handle(Progressed(1, 7))
    assert run.handle(Stalled(1, "no step", (2,), silent=frozenset({2}))).actions == [
        Kill(frozenset({0, 1, 2, 3}))
    ]
    run = saving(COMMITTING, REPORTED, REPORTED, REPORTED).handle(Progressed(1, 7))
    assert run.handle(Stalled(1, "no step", (2,), silent=frozenset({2}))).actions == [
        Kill(frozenset({2}))
    ]
    assert "3 of them have 600 s to end the save" in run.reason


@pytest.mark.parametrize("named", [(2,), ()])
def test_a_save_waits_for_no_process_that_hangs_before_it(named: tuple[int, ...]) -> None:
    """It reports as ever, and never comes to the save that the others are in: all end at once."""
    before = SavePosition(2, SaveStage.SETTLED)
    run = saving(REPORTED, REPORTED, before, REPORTED).handle(Progressed(1, 7))
    assert run.handle(Stalled(1, "no step", named)).actions == [Kill(frozenset({0, 1, 2, 3}))]
    run = saving(WRITING, REPORTED, REPORTED, REPORTED).handle(Progressed(1, 7))
    assert run.handle(Stalled(1, "no step", named)).actions == [], "they are all in it"


def test_a_stall_rule_without_steps_is_refused() -> None:
    """No attempt follows, whatever the budget: the message says what to add. After steps of an
    earlier attempt it is a hang.
    """
    run = running().handle(Stalled(1, "no process has reported a step within 600 s of its start"))
    assert (
        isinstance(run.job.error, StartupFailed)
        and run.actions == [Kill(), Release()]
        and run.job.exit_code == 1
    )
    assert (
        "call multihost.reached_preemption(step), manager.should_save(step) or"
        " group.report(step=step)" in str(run.job.error)
    )
    run = (
        running()
        .handle(Progressed(1, 7), Exited(1, 0, 1))
        .exit([1] * 4)
        .wake()
        .handle(Reserved(2, 4))
    )
    assert isinstance(run.handle(Stalled(2, "no step")).job.error, Hang)


def test_whoever_is_settled_is_ended_at_once() -> None:
    """Three with a client of ours and no save under way get SIGKILL, and no SIGTERM: ending is not
    preempting.
    """
    run = saving(SETTLED, SETTLED, SETTLED, NO_SAVE).handle(Exited(1, 2, -9))
    assert run.actions == [Kill(frozenset({0, 1, 3}))] and run.job.state is State.RESTARTING
    run.handle(Progressed(1, 5, saves=run.job.saves))
    assert run.actions == [], "told once"
    run = saving(SETTLED, None, SETTLED, SETTLED).handle(Exited(1, 2, -9))
    assert run.actions == [Kill(frozenset({0, 3})), Terminate(frozenset({1}))]
    assert run.handle(Progressed(1, saves=dict.fromkeys(range(4), SETTLED))).actions == [
        Kill(frozenset({1}))
    ], "as soon as it is known"


def test_a_save_that_can_be_committed_is() -> None:
    """The one that died had reported its share: the others are ended once the first of them knows
    how the save ended, and no earlier.
    """
    run = saving(COMMITTING, REPORTED, REPORTED, WRITING).handle(Exited(1, 2, -9))
    assert (
        run.actions == []
        and "3 of them have 600 s to end the save that can still be committed" in run.reason
    )
    assert run.wake().actions == [] and run.reason == "processes 0, 1, 3 still save"
    assert (
        run.handle(
            Progressed(1, saves={0: COMMITTING, 1: REPORTED, 2: REPORTED, 3: REPORTED})
        ).actions
        == []
    )
    assert run.handle(
        Progressed(1, 9, 9, saves={0: SETTLED, 1: REPORTED, 2: REPORTED, 3: REPORTED})
    ).actions == [Kill(frozenset({0, 1, 3}))]
    assert run.job.saved_step == 9 and run.job.progressed
    assert run.exit([-9, -9, -9, -9]).job.state is State.RESTARTING and run.actions == [
        Release(),
        PrepareNext(2, 4),
    ]


def test_a_save_needs_who_has_yet_to_begin() -> None:
    """Its share is awaited; where the dead one has begun no save of that number, nobody's is."""
    run = saving(REPORTED, NO_SAVE, REPORTED, REPORTED).handle(Exited(1, 2, 1))
    assert run.actions == [] and run.job.state is State.RESTARTING
    earlier = SavePosition(2, SaveStage.SETTLED)
    assert saving(REPORTED, NO_SAVE, earlier, WRITING).handle(Exited(1, 2, 1)).actions == [
        Kill(frozenset({0, 1, 3}))
    ]


def test_a_save_that_is_lost_keeps_nobody() -> None:
    """The dead one had not reported; or another one dies before it has, while the first is awaited;
    or the time is over.
    """
    assert saving(REPORTED, REPORTED, WRITING, REPORTED).handle(Exited(1, 2, -9)).actions == [
        Kill(frozenset({0, 1, 3}))
    ]
    run = saving(REPORTED, REPORTED, REPORTED, WRITING).handle(Exited(1, 2, -9))
    assert run.actions == [] and run.handle(Exited(1, 3, 1)).actions == [Kill(frozenset({0, 1}))]
    run = saving(COMMITTING, REPORTED, REPORTED, REPORTED).handle(Exited(1, 2, -9))
    assert run.wake().wake().actions == [Kill()] and run.now == 700.0
    assert (
        run.wake().actions == [Release(), PrepareNext(2, 4)]
        and "did not even end by SIGKILL" in run.reason
    )
    run = saving(COMMITTING, REPORTED, REPORTED, REPORTED).handle(Exited(1, 2, -9))
    assert run.handle(CoordinatorEnded(1, "the coordinator was ended by signal 9")).actions == [
        Kill(frozenset({0, 1, 3}))
    ]


def test_a_job_that_fails_commits_first_too() -> None:
    """No attempt follows, and the job fails with the code of the one that died, once the save is
    settled.
    """
    run = running(RestartPolicy()).handle(Progressed(1, saves=dict.fromkeys(range(4), REPORTED)))
    assert run.handle(Exited(1, 2, 3)).job.state is State.RESTARTING and run.actions == []
    run.handle(Progressed(1, 4, 4, saves=dict.fromkeys(range(4), SETTLED)))
    assert run.actions == [Kill(frozenset({0, 1, 3}))] and run.job.saved_step == 4
    run.exit([-9, -9, -9, -9])
    assert (run.job.state, run.job.exit_code, run.actions) == (State.FAILED, 3, [Release()])


def test_the_first_that_fails_decides_the_exit_code() -> None:
    """A signal is 128 + its number; what the others end with while they are being ended does not
    count.
    """
    assert running(RestartPolicy()).handle(Exited(1, 0, -11)).job.exit_code == 139
    run = running(RestartPolicy()).handle(Exited(1, 3, 17))
    assert (run.job.state, run.job.exit_code, run.actions) == (
        State.FAILED,
        17,
        [Terminate(frozenset({0, 1, 2})), Release()],
    )


@pytest.mark.parametrize("failures", [0, 2])
def test_a_late_93_still_wins(failures: int) -> None:
    """A peer's failure comes through first: the process that is leaving has `grace_s` to say 93,
    and a save that can be committed is awaited.
    """
    run = running(RestartPolicy(max_failures=failures), num_processes=3)
    positions = dict.fromkeys(range(3), COMMITTING)
    run.handle(Progressed(1, saves=positions, leaving=frozenset({0})), Exited(1, 1, 1))
    assert run.actions == []
    assert run.handle(Exited(1, 0, 93)).actions == []
    run.handle(Progressed(1, 9, 9, saves={**positions, 2: SETTLED}))
    assert run.actions == [Kill(frozenset({2}))]
    run.handle(Exited(1, 2, -9))
    assert isinstance(run.job.error, Fatal)
    assert (run.job.state, run.job.exit_code, run.job.saved_step) == (State.FAILED, 93, 9)


def test_who_never_ends_leaving_is_killed() -> None:
    """A process that is leaving gets SIGKILL after `grace_s`."""
    run = running(RestartPolicy(), num_processes=2)
    run.handle(Progressed(1, saves={0: NO_SAVE, 1: NO_SAVE}, leaving=frozenset({0})))
    assert run.handle(Exited(1, 1, 1)).actions == []
    assert run.wake().actions == [Kill()] and run.now == 105.0
    run.handle(Exited(1, 0, -9))
    assert (run.job.state, run.job.exit_code) == (State.FAILED, 1)


def test_a_coordinators_end_leaves_time_to_leave() -> None:
    """A process that is leaving keeps its `grace_s`: it may have 93 to say."""
    run = running(num_processes=3)
    run.handle(Progressed(1, saves=dict.fromkeys(range(3), COMMITTING), leaving=frozenset({0})))
    assert run.handle(Exited(1, 1, 1)).actions == []
    ended = CoordinatorEnded(1, "the coordinator was ended by signal 9")
    assert run.handle(ended).actions == [Kill(frozenset({2}))]
    assert run.job.wake_at == 105.0
    run.handle(Exited(1, 2, -9), Exited(1, 0, 93))
    assert (run.job.state, run.job.exit_code) == (State.FAILED, 93)


def test_a_coordinators_end_has_exit_code_1() -> None:
    """What a process ends with that is killed afterwards does not count."""
    run = running(RestartPolicy(), num_processes=2)
    run.handle(Progressed(1, saves=dict.fromkeys(range(2), NO_SAVE), leaving=frozenset({0})))
    run.handle(CoordinatorEnded(1, "the coordinator was ended by signal 9"))
    run.wake().handle(Exited(1, 0, -9), Exited(1, 1, -9))
    assert (run.job.state, run.job.exit_code) == (State.FAILED, 1)


@pytest.mark.parametrize(
    ("leaving", "kind"), [(Noticed("drain"), Preempted), (Capacity(4), WorkerFailed)]
)
def test_a_coordinators_end_ends_those_that_leave(leaving: Event, kind: type) -> None:
    """No save can be committed any more, whatever the processes are to leave for."""
    run = running(RestartPolicy(grow_after_s=0), num_processes=3)
    run.handle(Progressed(1, saves=dict.fromkeys(range(3), COMMITTING)), leaving)
    run.handle(CoordinatorEnded(1, "the coordinator was ended by signal 9"))
    assert run.actions == [Terminate(frozenset({0, 1, 2})), Release()]
    assert isinstance(run.job.error, kind)


def test_nobody_waits_after_the_last_save() -> None:
    """Once it is settled, who is leaving, or does not end by SIGKILL, has `grace_s`."""
    run = running(num_processes=3)
    run.handle(Progressed(1, saves=dict.fromkeys(range(3), COMMITTING), leaving=frozenset({0})))
    assert run.handle(Exited(1, 1, 1)).wake().job.wake_at == 700.0
    run.handle(Progressed(1, 9, 9, saves=dict.fromkeys(range(3), SETTLED)))
    assert run.actions == [Kill(frozenset({2}))] and run.job.wake_at == 110.0
    assert run.wake().actions == [Kill()]


def test_a_late_end_changes_no_back_off() -> None:
    """A process that SIGKILL did not end in time ends during the back-off, which goes on."""
    run = running(num_processes=2).handle(Exited(1, 0, 1)).wake()
    assert run.wake().actions == [Release(), PrepareNext(2, 2)]
    wake_at = run.job.wake_at
    run.now += 0.5
    assert run.handle(Exited(1, 1, -9)).actions == []
    assert run.job.wake_at == wake_at


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [(93, Fatal, 93), (124, Hang, 124), (75, Preempted, 75), (1, WorkerFailed, 1)],
)
def test_exit_codes_of_processes(code: int, kind: type, exit_code: int) -> None:
    """93 is never tried again, 124 is a hang, 75 a preemption; anything else is a failure."""
    run = running(RestartPolicy(max_failures=9 if code == 93 else 0)).exit([code] * 4)
    assert type(run.job.error) is kind
    assert (run.job.state, run.job.exit_code) == (
        State.PREEMPTED if code == 75 else State.FAILED,
        exit_code,
    )
    assert pickle.loads(pickle.dumps(run.job.error)).attempt == 1


def test_zero_after_a_notice_is_not_done() -> None:
    """PRE-1: workers that save and return after a notice come back, and are done when they end
    without one.
    """
    run = running().handle(Noticed("drain", delivered=False))
    assert run.actions == [Notify("drain")]
    assert run.exit([0, 0, 0, 0]).job.state is State.RESTARTING
    assert isinstance(run.job.error, Preempted)
    run.wake().handle(Reserved(2, 4))
    assert run.exit([0, 0, 0, 0]).job.state is State.FINISHED


def test_done_is_what_the_training_loop_says() -> None:
    """A loop that reported its end is done, notice or not."""
    run = running().handle(Noticed("drain"), Progressed(1, 10, 10, done=True))
    assert run.exit([0, 0, 0, 0]).job.state is State.FINISHED


def test_done_is_what_this_attempt_says() -> None:
    """What an attempt said that was lost with its last save is believed no more."""
    run = running().handle(Progressed(1, 10, 8, done=True)).exit([1] * 4).wake()
    run.handle(Reserved(2, 4), Noticed("drain")).exit([0, 0, 0, 0])
    assert run.job.state is State.RESTARTING


def test_a_death_after_a_notice_is_a_preemption() -> None:
    """Workers that die or raise while machines are taken away have not failed; the others do not
    wait for them for long.
    """
    run = running().handle(Noticed("drain", deadline=150.0), Exited(1, 1, 1))
    assert run.job.wake_at == 105.0
    run.handle(Exited(1, 0, 75), Exited(1, 2, -9), Exited(1, 3, 1))
    assert run.job.budget_used == {"max_preemptions": 1}


@pytest.mark.parametrize("leaving", [Noticed("drain"), Capacity(4)])
def test_a_commit_goes_on_after_a_notice(leaving: Event) -> None:
    """A process that had reported its share fails while all leave: the others commit until
    `commit_grace_s` or the notice's deadline, whichever comes first, then have `grace_s`.
    """
    # Never less than `grace_s`, which they have where there is nothing to commit.
    for commit_grace_s, ends in ((600.0, 220.0), (1.0, 105.0), (30.0, 130.0)):
        policy = RestartPolicy(max_preemptions=1, commit_grace_s=commit_grace_s, grow_after_s=0)
        run = running(policy, num_processes=3)
        run.handle(Progressed(1, saves={0: COMMITTING, 1: REPORTED, 2: REPORTED}), leaving)
        run.handle(Exited(1, 2, 1))
        assert f"2 of them have {ends - 100:.0f} s to end the save" in run.reason
        assert run.actions == [] and run.job.wake_at == ends
    run.now = 110.0
    run.handle(Progressed(1, 9, 9, saves=dict.fromkeys(range(3), SETTLED)))
    assert run.job.wake_at == 115.0
    assert run.wake().actions == [Kill()] and isinstance(run.job.error, Preempted)


def test_notices_merge_and_the_earliest_deadline_wins() -> None:
    """PRE-2: a later deadline never moves an earlier one; at the deadline what is left is
    killed.
    """
    run = running().handle(
        Noticed("a", deadline=190.0), Noticed("b", deadline=130.0), Noticed("c", deadline=500.0)
    )
    assert run.job.wake_at == 130.0
    assert run.wake().actions == [Kill()]
    assert run.job.error is not None
    assert (
        run.job.error.message
        == "processes 0, 1, 2, 3 were still there at the deadline of the notice"
    )


def test_a_notice_can_be_withdrawn() -> None:
    """The job runs on when the last notice is withdrawn, unless a process has already left."""
    run = running().handle(Noticed("a"), Noticed("b"), Withdrawn("a"))
    assert run.job.state is State.PREEMPTING
    assert run.handle(Withdrawn("b")).job.state is State.RUNNING
    assert run.actions == [Unnotify()]
    run.handle(Noticed("a"), Exited(1, 0, 75), Withdrawn("a"))
    assert run.job.state is State.PREEMPTING


def test_a_withdrawn_deadline_holds_no_more() -> None:
    """Those of the others do, and the time that all had from the first notice on."""
    run = running().handle(Noticed("a", deadline=110.0), Noticed("b", deadline=190.0))
    assert run.handle(Withdrawn("a")).job.wake_at == 190.0
    run = running().handle(Noticed("a", deadline=110.0), Noticed("b"), Exited(1, 0, 75))
    assert run.handle(Withdrawn("a")).job.wake_at == 220.0
    run = running().handle(Noticed("a", deadline=110.0), Noticed("b"), Exited(1, 0, 1))
    assert run.handle(Withdrawn("a")).job.wake_at == 105.0, "another one waits in vain"


def test_a_deadline_holds_while_growing() -> None:
    """A machine's own notice comes while all leave to come back as more."""
    run = running(RestartPolicy(grow_after_s=0), num_processes=2).handle(Capacity(4))
    assert run.job.wake_at == 220.0
    run.handle(Noticed("process 0 (preempted)", deadline=130.0, delivered=True))
    assert (run.job.state, run.job.wake_at) == (State.PREEMPTING, 130.0)


def test_a_deadline_holds_after_93() -> None:
    """No restart can help, and a save can still be committed: until the machines go."""
    run = saving(COMMITTING, REPORTED, REPORTED, REPORTED).handle(Noticed("a", deadline=130.0))
    assert run.handle(Exited(1, 3, 93)).actions == [] and run.job.wake_at == 105.0
    assert run.wake().actions == [] and run.job.wake_at == 130.0
    assert run.wake().actions == [Kill()]


def test_a_gang_too_large_times_out_once() -> None:
    """ERR-2: one deadline for all; everything is released; the error names the setting."""
    run = Run(RestartPolicy(startup_timeout_s=30)).handle(Start())
    run.now += 29
    assert run.handle(Waiting(1, "room for 1"), Tick()).job.state is State.SCHEDULING
    assert run.wake().job.state is State.FAILED
    assert run.actions == [Release()]
    assert isinstance(run.job.error, StartupTimeout)
    assert run.job.error.message == "no room for 2 processes within 30 s: room for 1"
    assert (run.job.error.knob, run.job.error.timeout_s) == ("startup_timeout_s", 30)


def test_a_failed_start_is_tried_again_later() -> None:
    """ERR-3: the next one waits twice as long each time, and ends with the budget."""
    run = Run(RestartPolicy(backoff_jitter=0.0)).handle(Start())
    waits = []
    for attempt in (1, 2, 3):
        run.handle(StartFailed(attempt, "port taken"))
        assert run.job.state is State.RESTARTING
        assert run.job.wake_at is not None
        waits.append(run.job.wake_at - run.now)
        run.wake()
    assert waits == [1.0, 2.0, 4.0]
    run.handle(StartFailed(4, "port taken"))
    assert isinstance(run.job.error, StartupFailed)
    assert run.reason == "attempt 4 could not start: port taken; max_startup_failures=3 is used up"


def test_a_machine_taken_while_starting_spends_the_budget_of_preemptions() -> None:
    """ERR-3: the machines went, the start itself did not fail."""
    run = Run(RestartPolicy(max_startup_failures=0, max_preemptions=1)).handle(Start())
    run.handle(StartFailed(1, "a machine went", preempted=True))
    assert run.job.state is State.RESTARTING
    run.wake()
    run.handle(StartFailed(2, "a machine went", preempted=True))
    assert isinstance(run.job.error, Preempted)


def test_back_off_is_capped_and_jittered() -> None:
    """Never above the cap, never below (1 - jitter) of it; two jobs do not wait alike."""
    policy = RestartPolicy(backoff_s=1, backoff_cap_s=60, backoff_jitter=0.25)
    waits = [
        backoff_s(Job(f"job {i}", 1, 1, policy, attempt=1, budget_used={"max_failures": 50}))
        for i in range(50)
    ]
    assert all(45 <= wait <= 60 for wait in waits)
    assert len(set(waits)) > 40


def test_progress_refills_the_budgets() -> None:
    """Ten failures with progress in between pass a budget of one; a second failure without progress
    does not.
    """
    run = running(RestartPolicy(max_failures=1))
    for saved in range(1, 11):
        run.handle(Progressed(run.job.attempt, step=saved * 10, saved_step=saved * 10)).exit(
            [-9] * 4
        )
        run.wake().handle(Reserved(run.job.attempt, 4))
    assert run.job.attempt == 11
    assert run.job.budget_used == {"max_failures": 1}
    assert run.exit([-9] * 4).job.state is State.FAILED


@pytest.mark.parametrize("limit", [{"max_failures": 1}, {"attempts_without_progress": 1}])
def test_the_last_save_of_an_attempt_refills_them_too(limit: dict[str, int]) -> None:
    """It may be committed after the death that would have been the last. Where restarts were never
    allowed, or the job is to stop, it ends all the same.
    """
    settled = Progressed(2, 20, 20, saves=dict.fromkeys(range(4), SETTLED))

    def dying() -> Run:
        run = running(RestartPolicy(**{"max_failures": 9} | limit)).handle(Progressed(1, 10, 10))
        begun = Progressed(2, 20, 10, saves=dict.fromkeys(range(4), REPORTED))
        return run.exit([-9] * 4).wake().handle(Reserved(2, 4), begun, Exited(2, 2, -9))

    run = dying().handle(settled).exit([-9] * 4)
    assert (run.job.state, run.job.budget_used) == (State.RESTARTING, {})
    assert run.actions == [Release(), PrepareNext(3, 4)]
    assert run.wake().handle(Reserved(3, 4)).job.state is State.RUNNING
    assert dying().exit([-9] * 4).job.state is State.FAILED, "no save was committed"
    run = dying().handle(Exited(2, 1, 93), settled).exit([-9] * 4)
    assert isinstance(run.job.error, Fatal) and run.job.final
    assert dying().handle(Stop("SIGTERM"), settled).exit([-9] * 4).job.final


def test_three_attempts_without_progress_are_enough() -> None:
    """Steps that were run before, and are run again, are no progress: the budget does not matter
    then.
    """
    run = (
        running(RestartPolicy(max_failures=100))
        .handle(Progressed(1, step=50, saved_step=40))
        .exit([1] * 4)
    )
    for attempt in (2, 3, 4):
        run.wake().handle(Reserved(attempt, 4), Progressed(attempt, step=45, saved_step=40)).exit(
            [1] * 4
        )
    assert run.job.state is State.FAILED
    assert run.reason.endswith("3 attempts in a row made no progress beyond step 50")


def test_growing_and_shrinking() -> None:
    """More room makes the job save and come back larger, not before it has run for a while; with
    less it comes back smaller. Neither takes of a budget.
    """
    run = running(num_processes=2)
    assert run.handle(Capacity(4)).job.state is State.RUNNING
    run.now += 30
    assert run.handle(Capacity(4)).actions == [Notify("growing")]
    assert (
        run.handle(Noticed("process 0 (SIGTERM received)", delivered=True)).job.state
        is State.PREEMPTING
        and run.job.grows
    )  # our own words
    assert run.exit([75, 75]).actions == [Release(), Reserve(2, 2, 4)]
    assert run.job.budget_used == {}
    run.handle(Reserved(2, 4), Capacity(2))
    assert run.job.state is State.PREEMPTING
    assert run.actions == [Launch(2, 4), Notify("room for 2 processes only")]
    echoes = [Noticed(f"process {each} (SIGTERM)", delivered=True) for each in range(4)]
    assert run.handle(*echoes).exit([75] * 4).actions == [Release(), Reserve(3, 2, 4)]
    assert run.job.budget_used == {}


def test_asked_to_stop_ends_as_preempted() -> None:
    """The launcher's own notice ends the job with 75, whatever the budgets, from any state."""
    run = running().handle(Stop("SIGTERM"))
    assert run.actions == [Notify("SIGTERM")]
    assert run.exit([0, 0, 0, 0]).job.exit_code == 75
    waiting = running().exit([1] * 4)
    assert waiting.handle(Stop("SIGTERM")).job.exit_code == 75
    ending = running().handle(
        Exited(1, 0, 1), Stop("SIGTERM"), *(Exited(1, process, 1) for process in (1, 2, 3))
    )
    assert ending.job.exit_code == 75
    assert ending.reason == (
        "asked to stop by SIGTERM; before that process 0 of 4 ended with exit code 1 in attempt 1"
    )
    echo = Noticed("process 0 (SIGTERM)", delivered=True)
    failed = running().handle(Stop("SIGTERM"), echo).exit([0, 0, 1, 0])
    assert failed.reason == (
        "all 4 processes have left after notice from SIGTERM; process 2 ended with exit code 1;"
        " nothing is started again"
    )


def test_a_job_of_one_process_has_one() -> None:
    """No "1 processes", and no verb for several."""
    run = Run(min_processes=1, max_processes=1).handle(Start())
    told = [run.reason, run.handle(Reserved(1, 1)).reason, run.handle(Stop("SIGTERM")).reason]
    told.append(run.exit([75]).reason)
    ended = Run(min_processes=1, max_processes=1).handle(Start(), Reserved(1, 1)).exit([0])
    assert [*told, ended.reason] == [
        "attempt 1 asks for 1 process",
        "attempt 1 starts with 1 process",
        "asked to stop by SIGTERM: 1 of 1 process has 120 s to save and leave",
        "the only process has left after notice from SIGTERM; nothing is started again",
        "the only process is done, attempt 1",
    ]
    late = running(num_processes=2).handle(Noticed("SIGTERM")).exit([75]).wake()
    assert str(late.job.error) == "process 1 was still there at the deadline of the notice"


def test_one_of_them_has_time() -> None:
    """To end the save that can still be committed."""
    reported = SavePosition(3, SaveStage.REPORTED)
    saves = {0: reported, 1: SavePosition(3, SaveStage.WRITING)}
    run = running(num_processes=2).handle(Progressed(1, 5, 1, saves=saves | {1: reported}))
    assert "; 1 of them has 600 s to end the save" in run.handle(Exited(1, 0, -9)).reason


def test_ctrl_c_while_an_attempt_is_ended_is_ctrl_c() -> None:
    """The launcher then ends with 130, as after every Ctrl-C."""
    run = running(num_processes=2).handle(Exited(1, 0, 1), Stop("SIGINT"))
    assert run.handle(Exited(1, 1, -9)).job.final and "SIGINT" in run.job.notices


def test_an_event_of_an_earlier_attempt_is_ignored() -> None:
    """ENV-5, seen from the supervisor: what attempt 1 did no longer matters to attempt 2."""
    run = running().exit([1] * 4).wake().handle(Reserved(2, 4))
    assert run.handle(Exited(1, 0, 93)).job.state is State.RUNNING
    assert run.reason == "process 0 of attempt 1 is gone at last"
    assert run.handle(Progressed(1, 9)).reason == "an event of attempt 1, now at 2"


def test_impossible_policies_and_sizes_are_refused() -> None:
    """A negative number in a policy and a job of no processes are the caller's mistakes."""
    with pytest.raises(ValueError, match=r"RestartPolicy\.grace_s is -1; expected 0 or more"):
        RestartPolicy(grace_s=-1)
    with pytest.raises(
        ValueError, match="a job needs 1 <= min_processes <= num_processes, found 3 and 2"
    ):
        Job("j", 3, 2)


# --- Processes that outlive an attempt


def restartable(policy: RestartPolicy = POLICY, count: int = 4) -> Run:
    """Returns a run of so many of four whose processes can outlive the attempt."""
    everybody = frozenset(range(count))
    positions = dict.fromkeys(range(count), NO_SAVE)
    run = running(policy, num_processes=count)
    return run.handle(Progressed(1, 5, saves=positions, restartable=everybody))


def back(attempt: int, *processes: int) -> Progressed:
    """Returns the word that processes have a client of ours in the attempt."""
    return Progressed(attempt, saves=dict.fromkeys(processes, NO_SAVE))


def test_the_others_stay() -> None:
    """At once, in the next attempt; it runs when they are back."""
    run = restartable().handle(Exited(1, 2, -9))
    assert run.job.state is State.REJOINING
    assert run.reason == (
        "process 2 of 4 was ended by signal 9 in attempt 1; processes 0, 1, 3 stay for attempt 2,"
        " 2 new"
    )
    why = "process 2 of 4 was ended by signal 9 in attempt 1"
    staying = frozenset({0, 1, 3})
    assert run.actions == [Rejoin(2, 4, staying, why), Replace(2, frozenset({2}))]
    assert run.handle(back(2, 0, 3)).job.state is State.REJOINING
    assert run.handle(back(2, 0, 1, 3)).job.state is State.RUNNING
    assert run.job.wake_at is None


def test_all_are_started_again_where_one_cannot_stay() -> None:
    """As ever: a program that does not ask for it, a process that leaves, the budget, 93, a hang of
    processes that live.
    """
    can = frozenset({0, 1})
    assert running().handle(Progressed(1, 5, restartable=can), Exited(1, 2, -9)).job.alive
    for cause in (
        [Progressed(1, 6, leaving=frozenset({0})), Exited(1, 2, -9)],
        [Exited(1, 2, 93)],
        [Stalled(1, "no step", (2,))],
        [CoordinatorEnded(1, "gone")],
        [Noticed("a"), Exited(1, 2, -9)],
    ):
        run = restartable().handle(*cause)
        assert not any(isinstance(action, Rejoin) for action in run.actions), cause
    spent = restartable(RestartPolicy(max_failures=0)).handle(Exited(1, 2, -9))
    assert spent.job.state is State.FAILED


def test_one_that_is_late_is_replaced() -> None:
    """After `rejoin_timeout_s`; a save that can be committed has `commit_grace_s`."""
    run = restartable().handle(Exited(1, 2, -9), back(2, 0, 1))
    assert run.job.wake_at == run.now + 10
    assert run.wake().actions == [Replace(2, frozenset({3}))]
    assert run.reason == "process 3 did not come back in 10 s: replaced"
    assert (run.job.state, run.job.wake_at) == (State.RUNNING, None)
    reported = dict.fromkeys(range(4), SavePosition(0, SaveStage.REPORTED))
    saving = restartable().handle(Progressed(1, 6, saves=reported), Exited(1, 2, -9))
    assert saving.job.wake_at == saving.now + 600
    (rejoin, _) = saving.actions
    assert isinstance(rejoin, Rejoin)
    assert rejoin.saving == rejoin.staying  # none of them ends itself


def test_one_that_ends_itself_is_replaced_in_the_same_attempt() -> None:
    """It sat in a call: that is no other death, and takes nothing of a budget. Where it was to
    outlive nothing its exit code is a failure as any other.
    """
    run = restartable().handle(Exited(1, 2, -9), back(2, 0))
    spent = dict(run.job.budget_used)
    run.handle(Exited(1, 3, STUCK))
    assert (run.job.state, run.actions) == (State.REJOINING, [Replace(2, frozenset({3}))])
    assert run.reason == "process 3 could not leave attempt 1, and is started again"
    run.handle(Exited(1, 1, STUCK))
    assert run.actions == [Replace(2, frozenset({1}))]
    assert (run.job.state, run.job.wake_at) == (State.RUNNING, None)
    assert run.job.budget_used == spent
    again = run.handle(Progressed(2, 7, restartable=frozenset({0, 2})), Exited(1, 0, STUCK))
    assert again.job.attempt == 3


def test_the_end_of_another_life_is_no_news() -> None:
    """A process has a life for each start: one that was late, and ends as it is replaced, has not
    ended in its new life; one that stays has the life that it had.
    """
    run = restartable().handle(Exited(1, 2, -9), back(2, 0, 1)).wake()
    assert run.job.lives == {0: 1, 1: 1, 2: 2, 3: 2}
    before = run.job
    assert run.handle(Exited(1, 3, -9), Exited(1, 2, -9), Exited(2, 0, 1)).job == before
    assert run.handle(Exited(1, 0, 1)).job.attempt == 3


def test_a_death_among_those_that_join_opens_another_attempt() -> None:
    """A replacement that has only just been started is started again."""
    run = restartable().handle(Exited(1, 2, -9), back(2, 0)).handle(Exited(1, 1, -9))
    assert [type(action) for action in run.actions] == [Rejoin, Replace]
    assert run.actions[0] == Rejoin(
        3, 4, frozenset({0, 3}), "process 1 of 4 was ended by signal 9 in attempt 2"
    )
    assert run.actions[1] == Replace(3, frozenset({1, 2}))


def test_processes_that_die_together_open_one_attempt() -> None:
    """Where a machine is lost the ends of its processes come one by one: those that have not met
    the others since are replaced in the attempt that the first has opened, out of no budget.
    """
    run = restartable().handle(Exited(1, 2, -9, met=1))
    spent = dict(run.job.budget_used)
    run.handle(Exited(1, 3, -9, met=1))
    assert (run.job.attempt, run.actions) == (2, [Replace(2, frozenset({3}))])
    assert run.reason == (
        "process 3 was ended by signal 9 before all met in attempt 2, and is started again"
    )
    run.handle(back(2, 0, 1), Exited(1, 1, 1, met=1))
    assert (run.job.state, run.actions) == (State.RUNNING, [Replace(2, frozenset({1}))])
    assert run.job.budget_used == spent and run.job.idle_attempts == 0


def test_what_is_new_and_dies_before_all_met_counts() -> None:
    """It may never start: another attempt, out of the budget. So does one that was started again
    in this attempt, one that has met the others, and 93.
    """
    for cause in (
        [Exited(2, 2, -9, met=1)],
        [Exited(1, 3, -9, met=1), Exited(2, 3, -9, met=1)],
        [Exited(1, 3, -9, met=2)],
    ):
        run = restartable(RestartPolicy(max_failures=2)).handle(Exited(1, 2, -9), *cause)
        assert (run.job.attempt, run.job.budget_used) == (3, {"max_failures": 2}), cause
    final = restartable().handle(Exited(1, 2, -9), Exited(1, 3, 93, met=1))
    assert final.job.state is State.FAILED


def test_one_that_is_in_a_save_keeps_its_time() -> None:
    """Another death, while it is not back yet, takes none of its `commit_grace_s`."""
    reported = dict.fromkeys(range(4), SavePosition(0, SaveStage.REPORTED))
    saving = restartable().handle(Progressed(1, 6, saves=reported), Exited(1, 2, -9))
    until = saving.job.wake_at
    again = saving.handle(back(2, 0)).handle(Exited(2, 2, -9))
    assert again.job.rejoining == frozenset({0, 1, 3})
    assert again.job.wake_at == until
    all_back = again.handle(back(3, 0, 1, 3), Progressed(3, 7, restartable=frozenset(range(4))))
    after = all_back.handle(Exited(3, 2, -9))
    assert after.job.wake_at == after.now + 10


def test_one_that_is_in_a_save_is_spared_where_the_next_attempt_fails() -> None:
    """The save is of the attempt before, with a coordinator of its own: it can still be committed
    until `commit_grace_s`. Those that are back, and those that are new, are asked to end.
    """
    reported = dict.fromkeys(range(4), SavePosition(0, SaveStage.REPORTED))
    saving = restartable(RestartPolicy(max_failures=2))
    saving.handle(Progressed(1, 6, saves=reported), Exited(1, 2, -9))
    run = saving.handle(back(2, 3), CoordinatorEnded(2, "gone"))
    assert run.job.state is State.RESTARTING
    assert run.actions == [Terminate(frozenset({2, 3}))]
    assert run.handle(Exited(2, 2, -15), Exited(1, 3, -9)).job.alive == frozenset({0, 1})
    assert run.wake().actions == []
    assert run.wake().actions == [Kill()]
    assert run.reason == "processes 0, 1 did not end in 600 s"


def test_one_that_was_done_is_started_again() -> None:
    """As all are where nobody stays: those that go on from a saved step need it."""
    run = restartable().handle(Exited(1, 2, -9)).handle(Exited(1, 0, 0))
    assert (run.job.state, run.actions) == (State.REJOINING, [Replace(2, frozenset({0}))])
    assert run.job.rejoining == frozenset({1, 3})
    assert run.handle(back(2, 1, 3)).job.state is State.RUNNING


def test_a_notice_while_they_join_is_passed_on() -> None:
    """To all of the new attempt."""
    run = restartable().handle(Exited(1, 2, -9)).handle(Noticed("a"))
    assert (run.job.state, run.actions) == (State.PREEMPTING, [Notify("a")])


ALL = frozenset(range(4))
DRAIN = Noticed("Ray drains 10.0.0.3", deadline=190.0, processes=frozenset({2, 3}))


def test_a_notice_to_some_replaces_them_alone() -> None:
    """It is given to them alone, from whom the others hear of it. Once all have left their loops
    the others stay, and each of them is replaced as soon as it has ended, out of no further budget.
    """
    run = restartable().handle(DRAIN)
    assert (run.job.state, run.actions) == (
        State.PREEMPTING,
        [Notify(DRAIN.source, DRAIN.processes)],
    )
    run.handle(Progressed(1, 7, 7, held=frozenset({0, 1, 2})))
    assert (run.job.state, run.actions) == (State.PREEMPTING, [])
    run.handle(Progressed(1, 7, 7, held=ALL))
    why = "4 of 4 processes left the loop after notice from Ray drains 10.0.0.3"
    assert run.actions == [Rejoin(2, 4, ALL, why, going=DRAIN.processes)]
    assert run.reason == f"{why}; processes 0, 1 stay for attempt 2, 2, 3 new"
    assert (run.job.state, run.job.staying) == (State.REJOINING, frozenset({0, 1}))
    spent = dict(run.job.budget_used)
    assert run.handle(Exited(1, 3, 0)).actions == [Replace(2, frozenset({3}))]
    assert run.reason == "process 3 left attempt 1, and is started again"
    assert run.handle(back(2, 0, 1)).job.state is State.REJOINING
    assert run.wake().actions == [Replace(2, frozenset({2}))]
    assert (run.job.state, run.job.budget_used) == (State.RUNNING, spent)
    assert spent == {"max_preemptions": 1}


def test_a_death_while_one_still_leaves_is_the_end_of_both() -> None:
    """The next attempt waits for nobody who is not to be in it."""
    run = restartable().handle(DRAIN, Progressed(1, 7, 7, held=ALL), Exited(1, 3, 0))
    run.handle(back(2, 0, 1), Exited(1, 1, -9))
    rejoin, lost = run.actions
    assert isinstance(rejoin, Rejoin)
    assert (rejoin.staying, rejoin.going) == (frozenset({0}), frozenset())
    assert lost == Replace(3, frozenset({1, 2, 3}))


def test_one_that_has_died_is_replaced_with_those_that_leave() -> None:
    """Its machine may have gone before it had left."""
    run = restartable().handle(DRAIN, Exited(1, 3, -9), Progressed(1, 7, 7, held=ALL - {3}))
    rejoin, lost = run.actions[-2:]
    assert isinstance(rejoin, Rejoin) and rejoin.going == frozenset({2})
    assert lost == Replace(2, frozenset({3}))


@pytest.mark.parametrize(
    "before",
    [
        [Noticed("a")],
        [DRAIN, Noticed("process 0 (SIGTERM)", delivered=True, processes=frozenset({0, 1}))],
        [DRAIN, Stop("SIGTERM")],
        [DRAIN, Progressed(1, 7, leaving=frozenset({0}))],
        [DRAIN, Progressed(1, 7, done=True)],
        [Progressed(1, 6, 6), DRAIN],
    ],
    ids=["all", "each", "stop", "one leaves", "done", "budget"],
)
def test_those_that_wait_are_told_that_nobody_stays(before: list[Event]) -> None:
    """Once, and as ever after a notice all leave."""
    is_spent = before[-1] is DRAIN
    run = restartable(RestartPolicy(max_preemptions=0 if is_spent else 2))
    run.handle(*before, Progressed(1, 7, held=ALL))
    assert run.actions[-1] == Dismiss()
    assert run.job.state is State.PREEMPTING
    assert run.handle(Progressed(1, 8, held=ALL)).actions == []
    run.exit([0, 0, 0, 0])
    assert run.job.state in (State.RESTARTING, State.PREEMPTED, State.FINISHED)


def test_a_notice_that_was_withdrawn_too_late_keeps_nobody() -> None:
    """Those that have left their loops for it begin again, all of them."""
    waits = Progressed(1, 7, 7, held=frozenset({0}))
    for events in ([waits], [Noticed("a"), waits, Withdrawn("a")]):
        run = restartable().handle(*events)
        assert run.job.state is State.PREEMPTING
        run.handle(Progressed(1, 7, 7, held=ALL))
        (rejoin,) = run.actions
        assert isinstance(rejoin, Rejoin)
        assert (rejoin.staying, rejoin.going) == (ALL, frozenset())


def test_a_notice_of_the_attempt_before_is_none_of_this_one() -> None:
    run = restartable().handle(Exited(1, 2, -9))
    late = Noticed("process 2 (SIGTERM)", delivered=True, processes=frozenset({2}), attempt=1)
    assert run.handle(late).job.state is State.REJOINING


# --- More or fewer of them

AT_ONCE = RestartPolicy(max_failures=2, max_preemptions=2, grow_after_s=0, backoff_jitter=0.0)
GROWS = Noticed("process 0 (growing)", delivered=True, processes=frozenset({0}), attempt=1)


def test_to_grow_all_stay() -> None:
    """Process 0 alone is asked, and tells the others: nobody has a notice that would stand in the
    next attempt. It takes of no budget.
    """
    run = restartable(AT_ONCE, 2).handle(Capacity(9))
    assert (run.job.state, run.actions) == (State.PREEMPTING, [Grow()])
    assert run.reason.startswith("room for 9 processes, the job has 2: come back as 4")
    assert run.handle(GROWS).actions == []
    run.handle(Progressed(1, 7, 7, held=frozenset({0, 1})))
    both = frozenset({0, 1})
    why = "2 of 2 processes left the loop to come back as 4"
    assert run.actions == [Rejoin(2, 4, both, why), Replace(2, frozenset({2, 3}))]
    assert run.reason == f"{why}; processes 0, 1 stay for attempt 2, 2, 3 new"
    assert run.handle(back(2, 0, 1)).job.state is State.RUNNING
    assert (run.job.num_processes, run.job.staying, run.job.budget_used) == (4, both, {})
    assert run.handle(Capacity(4)).actions == []


def test_to_grow_all_are_started_again_where_one_cannot_stay() -> None:
    """As ever: all get SIGTERM."""
    run = running(AT_ONCE, num_processes=2)
    run.handle(Progressed(1, 5, restartable=frozenset({0})), Capacity(4))
    assert run.actions == [Notify("growing")]


@pytest.mark.parametrize(
    ("notice", "staying"),
    [
        (Noticed("process 1 (SIGTERM received)", None, True, frozenset({1}), 1), {0, 2}),
        (Noticed("process 0 (SIGTERM received)", None, True, frozenset({0}), 1), {1, 2}),
        (Noticed("Ray drains 10.0.0.3", 160.0, processes=frozenset({2})), {0, 1}),
    ],
)
def test_a_notice_while_growing_comes_first(notice: Noticed, staying: set[int]) -> None:
    """Its processes are replaced, and the others stay. There may be no room for more any longer:
    the job grows later.
    """
    run = restartable(AT_ONCE, 3).handle(Capacity(4), GROWS, notice)
    run.handle(Progressed(1, 7, 7, held=frozenset(range(3))))
    (rejoin,) = run.actions
    assert isinstance(rejoin, Rejoin)
    assert (rejoin.num_processes, rejoin.staying - rejoin.going) == (3, staying)
    assert run.job.budget_used == {"max_preemptions": 1}


def test_a_death_while_growing_is_replaced_among_the_new() -> None:
    run = restartable(AT_ONCE, 3).handle(Capacity(4), GROWS, Exited(1, 1, -9))
    run.handle(Progressed(1, 7, 7, held=frozenset({0, 2})))
    rejoin, lost = run.actions
    assert isinstance(rejoin, Rejoin) and rejoin.staying == frozenset({0, 2})
    assert lost == Replace(2, frozenset({1, 3}))


def test_to_shrink_the_others_stay() -> None:
    """Those of the highest numbers leave, and nobody comes in their place. Whoever has not left in
    time is ended.
    """
    run = restartable().handle(Capacity(2))
    highest = frozenset({2, 3})
    assert run.actions == [Notify("room for 2 processes only", highest)]
    echo = Noticed("process 2 (SIGTERM received)", delivered=True, processes=frozenset({2}))
    run.handle(echo, Progressed(1, 7, 7, held=ALL))
    (rejoin,) = run.actions
    assert isinstance(rejoin, Rejoin)
    assert (rejoin.num_processes, rejoin.staying, rejoin.going) == (2, ALL, highest)
    assert run.reason.endswith("processes 0, 1 stay for attempt 2, 2, 3 not")
    assert run.job.budget_used == {}
    assert (run.job.num_processes, run.job.staying) == (2, frozenset({0, 1}))
    run.handle(back(2, 0, 1))
    assert run.job.state is State.REJOINING
    assert run.handle(Exited(1, 3, 0)).reason == "process 3 left attempt 1"
    assert run.wake().actions == [Kill(frozenset({2}))]
    assert run.reason == "process 2 did not leave in 10 s: ended"
    assert (run.job.state, run.job.num_processes) == (State.RUNNING, 2)
    assert run.handle(Exited(1, 2, -9)).reason == "process 2 of attempt 1 is gone at last"


@pytest.mark.parametrize("event", [Noticed("a"), Stop("SIGTERM"), Exited(1, 0, -9)])
def test_whom_nobody_replaces_is_ended_with_the_attempt(event: Event) -> None:
    """Where something else ends it before all are back."""
    run = restartable().handle(Capacity(3), Progressed(1, 7, 7, held=ALL), event)
    assert run.actions[-1] == Kill(frozenset({3}))
    assert (run.job.surplus, run.job.lives.get(3)) == (frozenset(), None)


def test_with_too_little_room_all_leave() -> None:
    """Fewer than `min_processes` are nobody: that is a preemption."""
    run = restartable().handle(Capacity(1))
    assert run.actions == [Notify("room for 1 process only")]
    assert run.exit([75] * 4).job.budget_used == {"max_preemptions": 1}


def full(attempt: int, *processes: int) -> Unplaced:
    """Returns the word that there is no room for processes of the attempt."""
    return Unplaced(attempt, frozenset(processes), "no room for them")


def test_without_room_the_others_go_on_as_fewer() -> None:
    """Under numbers without a gap, out of no further budget: whoever is back already comes again,
    and a save that can be committed keeps its time.
    """
    reported = dict.fromkeys(range(4), SavePosition(0, SaveStage.REPORTED))
    run = restartable().handle(Progressed(1, 6, saves=reported), Exited(1, 1, -9), back(2, 0))
    spent = dict(run.job.budget_used)
    run.handle(full(2, 1))
    why = "no room for them; 3 of 4 processes go on"
    assert run.actions == [
        Rejoin(3, 3, frozenset({0, 1, 2}), why, frozenset({1, 2}), numbers_before=(0, 2, 3))
    ]
    assert run.reason == f"{why}; processes 0, 1, 2 stay for attempt 3"
    assert (run.job.lives, run.job.budget_used) == ({0: 1, 1: 1, 2: 1}, spent)
    assert run.handle(back(3, 0, 1, 2)).job.state is State.RUNNING
    assert run.job.num_processes == 3
    run.handle(Exited(1, 2, -9), full(4, 2))
    assert isinstance(run.actions[2], Rejoin)
    assert (run.job.num_processes, run.job.staying) == (2, frozenset({0, 1}))


def test_one_that_was_lost_too_is_started_where_there_is_room() -> None:
    """It is new in the smaller attempt."""
    run = restartable().handle(Exited(1, 1, -9, met=1), Exited(1, 2, -9, met=1), full(2, 1))
    rejoin, lost = run.actions[-2:]
    assert isinstance(rejoin, Rejoin) and rejoin.staying == frozenset({0, 2})
    assert (rejoin.numbers_before, lost) == ((0, 2, 3), Replace(3, frozenset({1})))
    assert run.job.lives == {0: 1, 1: 3, 2: 1}


def test_where_somebody_cannot_stay_there_is_another_start() -> None:
    """For as many as there is room for."""
    leaves = Progressed(2, 6, leaving=frozenset({0}))
    run = restartable().handle(Exited(1, 1, -9), back(2, 0, 2, 3), leaves, full(2, 1))
    assert run.job.state is State.RESTARTING
    assert "attempt 2 could not start: no room for them" in run.reason


# --- Any sequence of events


def _random_event(lots: random.Random, job: Job, now: float) -> Event:
    attempt = job.attempt if lots.random() < 0.9 else max(0, job.attempt - 1)
    process = lots.choice(sorted(job.alive) or [0])
    choices: list[Event] = [
        Start(),
        Reserved(attempt, lots.randint(1, 5)),
        Reserved(attempt, 4),
        StartFailed(attempt, "lots"),
        StartFailed(attempt, "lots", preempted=True),
        Waiting(attempt, "no room"),
        Exited(attempt, process, lots.choice([0, 0, 0, 75, 75, 1, -9, 93, 124])),
        Exited(attempt, process, lots.choice([0, 75, 1])),
        Progressed(
            attempt,
            job.step + lots.randint(-2, 2),
            job.saved_step + lots.randint(-1, 1),
            done=lots.random() < 0.05,
            saves={each: NO_SAVE for each in range(4) if lots.random() < 0.8},
            leaving=frozenset(lots.sample(range(4), lots.choice([0, 0, 0, 1]))),
            restartable=frozenset(each for each in range(4) if lots.random() < 0.8),
            held=frozenset(lots.sample(range(4), lots.choice([0, 0, 0, 1, 4]))),
        ),
        Noticed(
            lots.choice("ab"),
            lots.choice([None, now + 5, now + 50]),
            delivered=lots.random() < 0.5,
            processes=frozenset(lots.sample(range(4), lots.choice([0, 1, 2]))),
        ),
        Withdrawn(lots.choice("ab")),
        Capacity(lots.randint(1, 5)),
        Unplaced(attempt, frozenset({process}) & job.replaced, "lots"),
        Stalled(attempt, "no step", (process,), lots.choice([frozenset(), frozenset({process})])),
        Tick(),
        Tick(),
    ]
    return Stop("SIGTERM") if lots.random() < 0.005 else lots.choice(choices)


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=[pytest.mark.slow] * (block > 0)) for block in range(10)]
)
def test_no_sequence_of_events_breaks_the_promises(block: int) -> None:
    """10,000 random sequences: no attempt beyond its budget, no lost preemption, no state without
    an exit, nothing left behind.
    """
    for seed in range(block * 1000, (block + 1) * 1000):
        lots = random.Random(seed)
        policy = RestartPolicy(
            max_failures=lots.randint(0, 3),
            max_preemptions=lots.randint(0, 3),
            max_startup_timeouts=lots.randint(0, 2),
            grow_after_s=1,
        )
        job = Job(f"job {seed}", lots.randint(1, 4), 4, policy)
        now = 0.0
        since_progress = 0
        for _ in range(lots.randint(5, 60)):
            event = _random_event(lots, job, now)
            decision = decide(job, event, now)
            check_step(Step(job, event, now, decision))
            resized = job.resizes
            since_progress += decision.job.attempt > job.attempt and not resized
            since_progress = (
                0 if isinstance(event, Progressed) and decision.job.progressed else since_progress
            )
            budget = (
                policy.max_failures
                + policy.max_preemptions
                + policy.max_startup_failures
                + policy.max_startup_timeouts
            )
            assert since_progress <= 1 + budget
            job = decision.job
            now = now + lots.choice([0.0, 0.1, 1.0, 20.0, 700.0])
        check_way_out(decide, job, now)

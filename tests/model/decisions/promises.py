"""What no sequence of events may make of a job. Each promise has a name: a mutation breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.launch import Preempted
from holdfast.launch.supervisor.job import (
    Action,
    Decision,
    Event,
    Exited,
    Job,
    Kill,
    Launch,
    Noticed,
    Notify,
    Rejoin,
    Replace,
    Reserved,
    Stalled,
    Start,
    State,
    Stop,
    Terminate,
    Tick,
    Withdrawn,
)
from holdfast.multihost.group.group import SaveStage
from tests.model.promise import Broken, need

Decide = Callable[[Job, Event, float], Decision]
ROUNDS = 200  # of time alone, after which a job has ended


@dataclass(frozen=True)
class Step:
    """One event, what it was decided upon, and what was decided."""

    before: Job
    event: Event
    now: float
    decision: Decision

    @property
    def after(self) -> Job:
        """The job after the event."""
        return self.decision.job

    @property
    def actions(self) -> tuple[Action, ...]:
        """What is to be done."""
        return self.decision.actions


def check_step(step: Step) -> None:
    """Raises Broken where one decision breaks a promise."""
    need(bool(step.decision.reason), "SAID", "a decision without a reason")
    _check_final(step)
    _check_attempts(step)
    _check_notices(step)
    _check_commit(step)


def _check_final(step: Step) -> None:
    before = step.before
    after = step.after
    if before.final:
        need(after == before and not step.actions, "FINAL", "something happens after the end")
        return
    codes = {State.FINISHED: after.exit_code == 0, State.PREEMPTED: after.exit_code == 75}
    codes[State.FAILED] = after.exit_code not in (0, 75) and after.error is not None
    need(codes.get(after.state, True), "EXIT CODE", f"{after.state} with {after.exit_code}")
    if after.final and after.alive:
        ended = any(isinstance(action, Terminate | Kill) for action in step.actions)
        need(ended, "NOBODY LEFT", "processes that nobody ends")


def _check_attempts(step: Step) -> None:
    before = step.before
    after = step.after
    for setting, used in after.budget_used.items():
        need(used <= getattr(before.policy, setting), "BUDGET", f"{setting} is overdrawn")
    launches = [action for action in step.actions if isinstance(action, Launch)]
    need(len(launches) <= 1, "ONE LIFE", "two launches at once")
    need(not (launches and before.alive), "ONE LIFE", "a launch beside processes that live")
    if after.attempt == before.attempt:
        return
    need(after.attempt == before.attempt + 1, "ATTEMPTS", "a number is left out")
    begins = after.state in (State.SCHEDULING, State.REJOINING)
    need(begins, "ATTEMPTS", f"one that begins as {after.state}")
    need(not before.stopping, "STOPPED", "an attempt after a stop")
    if after.state is State.REJOINING:
        _check_rejoin(before, after, step.actions)


def _check_rejoin(before: Job, after: Job, actions: tuple[Action, ...]) -> None:
    """Each process stays or is started anew; none stays that is dead or has never said it can."""
    rejoin, new = actions
    assert isinstance(rejoin, Rejoin) and isinstance(new, Replace)
    everybody = frozenset(range(before.num_processes))
    need(rejoin.staying | new.processes == after.alive == everybody, "REJOIN", "one is missing")
    need(not rejoin.staying & new.processes, "REJOIN", "one stays and is started anew")
    can = before.alive & (before.restartable | before.rejoining)
    need(bool(rejoin.staying) and rejoin.staying <= can, "REJOIN", "one stays that cannot")
    need(not before.notices, "NOTICE", "a preemption that the next attempt would not know")


def _check_notices(step: Step) -> None:
    before = step.before
    event = step.event
    after = step.after
    runs = before.state in (State.RUNNING, State.REJOINING)
    if runs and (isinstance(event, Noticed) or (isinstance(event, Stop) and before.alive)):
        need(after.state is State.PREEMPTING, "NOTICE", "a preemption that is lost")
        is_told = getattr(event, "delivered", False) or any(
            isinstance(action, Notify) for action in step.actions
        )
        need(is_told, "NOTICE", "the processes are not told")
    if before.state is not State.PREEMPTING:
        return
    if after.state is State.FINISHED:
        need(before.reported_done or after.reported_done, "DONE", "taken for done after a notice")
        return
    if before.grows or isinstance(event, Withdrawn):
        return
    refuses = isinstance(event, Exited) and event.code == 93
    is_preempted = after.state is State.PREEMPTING or isinstance(after.error, Preempted)
    need(is_preempted or refuses, "NOTICE", "what follows a notice is no preemption")


def _check_commit(step: Step) -> None:
    """Nobody is ended whom a save needs that can still be committed, while there is time."""
    before = step.before
    after = step.after
    saves = getattr(step.event, "saves", None) or before.saves
    positions = {p: saves.get(p) for p in (*before.alive, *before.exit_codes)}
    known = [position for position in positions.values() if position is not None]
    if not known or isinstance(step.event, Exited) or before.silent or after.silent:
        return
    latest = max(position.save for position in known)
    gone_reported = all(
        (position := positions[process]) is not None and position >= (latest, SaveStage.REPORTED)
        for process in before.exit_codes
    )
    if not gone_reported or any(p == (latest, SaveStage.SETTLED) for p in known):
        return
    deadline = min([at for at in before.notices.values() if at is not None], default=None)
    if isinstance(step.event, Tick) and step.now == before.wake_at:
        return  # its time is over
    if isinstance(step.event, Stalled) and before.step < 0:
        return  # a rule that has no steps to go by is refused at once
    if deadline is not None and step.now >= deadline:
        return
    for action in step.actions:
        if isinstance(action, Kill):
            ended = before.alive if action.processes is None else action.processes
            needed = {p for p in before.alive if positions[p] is not None}
            need(not ended & needed, "COMMIT", "a save that could be committed is cut off")


def check_way_out(decide: Decide, job: Job, now: float) -> None:
    """Raises Broken where time alone brings the job neither to an end nor back to running."""
    for _ in range(ROUNDS):
        if job.final or (job.state is State.RUNNING and job.alive):
            return
        event: Event
        if job.state is State.INITIALIZING:
            event = Start()
        elif job.state is State.SCHEDULING:
            event = Reserved(job.attempt, job.max_processes)
        else:
            need(job.wake_at is not None, "WAY OUT", f"{job.state} waits for nothing")
            assert job.wake_at is not None
            now = max(now, job.wake_at)
            event = Tick()
        job = decide(job, event, now).job
    raise Broken("WAY OUT", f"{job.state} has no end")

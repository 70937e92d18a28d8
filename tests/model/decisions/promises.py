"""What no sequence of events may make of a job. Each promise has a name: a mutation breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.launch import Preempted
from holdfast.launch.supervisor.job import (
    Action,
    Capacity,
    Decision,
    Event,
    Exited,
    Job,
    Kill,
    Launch,
    Noticed,
    Notify,
    Progressed,
    Rejoin,
    Replace,
    Reserved,
    Stalled,
    Start,
    State,
    Stop,
    Terminate,
    Tick,
    Unplaced,
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
    _check_size(step)
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
        _check_rejoin(step)


def _check_rejoin(step: Step) -> None:
    """Each process stays, ends by itself or is started anew; none stays that is dead, has never
    said that it can, or whose machine is given back. One that has no number any more ends.
    """
    before = step.before
    event = step.event
    rejoin, *others = step.actions
    assert isinstance(rejoin, Rejoin)
    new = [process for each in others if isinstance(each, Replace) for process in each.processes]
    everybody = frozenset(range(rejoin.num_processes))
    stayed = frozenset(map(rejoin.number_before, rejoin.staying))
    stays = rejoin.staying.union(new) - step.after.surplus
    need(stays == step.after.alive == everybody, "REJOIN", "one is missing")
    need(step.after.surplus <= rejoin.going, "REJOIN", "one stays that has no number")
    sizes = {before.num_processes, before.resize_to}
    if isinstance(event, Unplaced):
        sizes = {before.num_processes - len(event.processes)}
        need(not stayed & event.processes, "REJOIN", "one stays for whom there is no room")
    need(rejoin.num_processes in sizes, "REJOIN", "a number that nobody has decided")
    need(not rejoin.staying.intersection(new), "REJOIN", "one stays and is started anew")
    can = before.alive & (before.restartable | before.rejoining)
    if isinstance(event, Progressed):
        can |= before.alive & event.restartable
    staying = rejoin.staying - rejoin.going
    need(bool(staying) and stayed <= can, "REJOIN", "one stays that cannot")
    noticed = before.noticed
    if isinstance(event, Noticed):
        noticed |= event.processes or everybody
    need(not staying & noticed, "NOTICE", "one stays whose machine is given back")
    if before.notices:
        told = before.held | getattr(event, "held", frozenset())
        need(rejoin.staying <= told, "NOTICE", "one has not come to the step at which all save")


def _check_size(step: Step) -> None:
    """For more room or less nobody gets a signal who can stay, and nobody is forgotten."""
    before = step.before
    over = (step.after.state, step.after.attempt) != (State.REJOINING, before.attempt)
    left = before.surplus if before.state is State.REJOINING and over else frozenset()
    if isinstance(step.event, Exited):
        left -= {step.event.process}
    ended = [each for each in step.actions if isinstance(each, Kill)]
    told = frozenset[int]().union(*(each.processes or left for each in ended))
    need(left <= told, "NOBODY LEFT", "one that nobody replaces is forgotten")
    if not isinstance(step.event, Capacity) or before.exit_codes:
        return
    if not before.alive <= before.restartable or step.event.num_processes < before.min_processes:
        return
    stay = frozenset(range(step.event.num_processes))
    for action in step.actions:
        if isinstance(action, Notify):
            told = before.alive if action.processes is None else action.processes
            need(not told & stay, "SIZE", "one that can stay gets a signal")


def _check_notices(step: Step) -> None:
    before = step.before
    event = step.event
    after = step.after
    runs = before.state in (State.RUNNING, State.REJOINING)
    if runs and (isinstance(event, Noticed) or (isinstance(event, Stop) and before.alive)):
        is_taken = after.state is State.PREEMPTING or after.attempt > before.attempt
        need(is_taken, "NOTICE", "a preemption that is lost")
        is_told = getattr(event, "delivered", False) or any(
            isinstance(action, Notify | Rejoin) for action in step.actions
        )
        need(is_told, "NOTICE", "the processes are not told")
    if after.state is State.PREEMPTING and after.alive & after.held:
        silent = after.alive & after.saves.keys() - after.held - after.leaving
        need(after.dismissed or bool(silent), "HELD", "those that wait hear nothing")
    if before.state is not State.PREEMPTING or after.state is State.REJOINING:
        return
    if after.state is State.FINISHED:
        need(before.reported_done or after.reported_done, "DONE", "taken for done after a notice")
        return
    if before.resizes or isinstance(event, Withdrawn):
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
    known_at = (notice.deadline for notice in before.notices.values())
    deadline = min([at for at in known_at if at is not None], default=None)
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

"""Decides what happens to a job: one pure function, `decide(job, event, now)`.

It has no clock, thread, process or socket.

    initializing -> scheduling -> running -> finished
    scheduling -> restarting -> scheduling
        starting failed or took too long, while its budget lasts
    running -> restarting -> scheduling
        a process died or hangs, while its budget lasts
    running -> rejoining -> running
        likewise, where all others can outlive the attempt; and where there is no room for those
        that were lost, and the job may have fewer
    running -> preempting -> restarting -> scheduling
        a notice: save, leave, come back
    running -> preempting -> rejoining -> running
        a notice to some processes: all save, these leave, the others outlive the attempt; or a
        notice of the launcher's own: there is room for more, or for fewer
    running -> preempting -> scheduling
        more room, or less, where not all processes can outlive the attempt
    any -> preempted
        asked to stop, or preempted once too often
    any -> failed
        another budget is spent, no progress, exit code 93

Engines (this machine, Ray, Slurm) report events and carry out actions; they decide nothing. After a
notice an exit code of 0 does not mean done, unless the training loop reported so: the job comes
back, finds its last step, and ends at once if nothing is left to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set, Sized
from dataclasses import replace
from typing import Any, TypeAlias

from holdfast.coordination.diagnosis.summary import counted
from holdfast.coordination.names import GROWING
from holdfast.multihost import (
    Fatal,
    Hang,
    JobError,
    Preempted,
    StartupFailed,
    StartupTimeout,
    WorkerFailed,
)
from holdfast.multihost.group.group import SaveStage

from .job import (
    DO_NOT_RESTART,
    DONE,
    HANG,
    NO_SAVE,
    PREEMPTED,
    STUCK,
    Action,
    Attempt,
    Capacity,
    CoordinatorEnded,
    Decision,
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
    how_ended,
    renumbered,
)

# Which setting of RestartPolicy is the budget of an error. Fatal has none.
_BUDGETS: dict[type[JobError], str] = {
    StartupTimeout: "max_startup_timeouts",
    StartupFailed: "max_startup_failures",
    Preempted: "max_preemptions",
    WorkerFailed: "max_failures",
    Hang: "max_failures",
}

_LEFT = (DONE, PREEMPTED)  # exit codes of a process that has left as a notice asks it to

_STEPS_WANTED = (
    "stall_timeout_s goes by steps; call multihost.reached_preemption(step),"
    " manager.should_save(step) or group.report(step=step) in the training loop, give"
    " startup_timeout_s more seconds where the first step takes so long, or leave"
    " stall_timeout_s out"
)


def decide(job: Job, event: Event, now: float) -> Decision:
    """Returns what `event` at `now` makes of `job`, what to do, and why. Pure and total."""
    # An engine reports from threads: the end of an attempt may come after the next has begun.
    of_attempt = getattr(event, "attempt", None)
    if of_attempt not in (None, job.attempt):
        return _decision(job, f"an event of attempt {of_attempt}, now at {job.attempt}")
    if isinstance(event, Exited) and event.life != job.lives.get(event.process):
        return _decision(job, f"process {event.process} of attempt {event.life} is gone at last")
    if isinstance(event, Tick) and (job.wake_at is None or now < job.wake_at):
        return _decision(job, f"nothing is due while {job.state}")
    handler = _TABLE.get(job.state, {}).get(type(event))
    if handler is None:
        return _decision(job, f"nothing to do for {type(event).__name__} while {job.state}")
    return _end_surplus(job, handler(job, event, now))


def backoff_s(job: Job) -> float:
    """Returns how long to wait before the next attempt: exponential, capped, with a jitter.

    The jitter is drawn from (job, attempt).
    """
    policy = job.policy
    tries = max(0, sum(job.budget_used.values()) - 1)
    longest = min(policy.backoff_cap_s, policy.backoff_s * 2.0 ** min(tries, 32))
    # Drawn from the job, not from the clock: the same events give the same decisions.
    drawn = random.Random(f"{job.job_id}/{job.attempt}").random()
    return longest * (1 - policy.backoff_jitter * drawn)


def _decision(job: Job, reason: str, *actions: Action) -> Decision:
    return Decision(job, actions, reason)


# --- Starting


def _schedule(job: Job, now: float, why: str) -> Decision:
    wake_at = now + job.policy.startup_timeout_s
    following = replace(_next_attempt(job), state=State.SCHEDULING, wake_at=wake_at)
    attempt = following.attempt
    wanted = counted(job.max_processes, "process")
    if job.min_processes < job.max_processes:
        wanted = f"{job.min_processes} to {wanted}"
    reserve = Reserve(attempt, job.min_processes, job.max_processes)
    return _decision(following, f"attempt {attempt} asks for {wanted}{why}", reserve)


def _next_attempt(job: Job) -> Job:
    """Returns the job with nothing of the attempt that is over but what it has come to."""
    return replace(job, attempt=job.attempt + 1, **vars(Attempt()))


def _on_start(job: Job, event: Start, now: float) -> Decision:
    return _schedule(job, now, "")


def _on_reserved(job: Job, event: Reserved, now: float) -> Decision:
    num_processes = min(event.num_processes, job.max_processes)
    if num_processes < job.min_processes:
        least = counted(job.min_processes, "process")
        reason = f"room for {num_processes} of at least {least}"
        return _decision(replace(job, why_waiting=reason), f"{reason}: still waiting")
    following = replace(
        job,
        state=State.RUNNING,
        alive=frozenset(range(num_processes)),
        lives=dict.fromkeys(range(num_processes), job.attempt),
        started_at=now,
        wake_at=None,
    )
    reason = f"attempt {job.attempt} starts with {counted(num_processes, 'process')}"
    return _decision(following, reason, Launch(job.attempt, num_processes))


def _on_waiting(job: Job, event: Waiting, now: float) -> Decision:
    job = replace(job, why_waiting=event.why)
    return _decision(job, f"attempt {job.attempt} waits: {event.why}")


def _on_tick_while_scheduling(job: Job, event: Tick, now: float) -> Decision:
    limit_s = job.policy.startup_timeout_s
    message = f"no room for {counted(job.min_processes, 'process')} within {limit_s:g} s"
    if job.why_waiting:
        message += f": {job.why_waiting}"
    error = _error(job, StartupTimeout, message, timeout_s=limit_s, knob="startup_timeout_s")
    return _end_attempt(job, error, now)


def _on_start_failed(job: Job, event: StartFailed, now: float) -> Decision:
    if event.final:
        return _end_job(job, _error(job, StartupFailed, event.why), event.why, Kill())
    message = f"attempt {job.attempt} could not start: {event.why}"
    kind = Preempted if event.preempted else StartupFailed
    return _end_attempt(job, _error(job, kind, message), now)


# --- Running


def _on_exit_while_running(job: Job, event: Exited, now: float) -> Decision:
    if how := _how_missed(job, event):
        return _replace_alone(job, event.process, how)
    job = _without(job, event)
    if event.code == PREEMPTED:
        notice = Noticed(f"process {event.process}")
        left = f"{notice.source} left as preempted"
        return _preempt(job, _add_notice(job, notice), now, left)
    if event.code != DONE:
        return _end_attempt(job, _worker_error(job, event), now)
    if job.alive:
        running = _alive_of(job, "still runs", "still run")
        return _decision(job, f"process {event.process} is done; {running}")
    return _finish(job, f"{_everybody(job, 'is', 'are')} done, attempt {job.attempt}")


def _finish(job: Job, reason: str) -> Decision:
    return _decision(replace(job, state=State.FINISHED, wake_at=None), reason, Release())


def _on_coordinator_ended(job: Job, event: CoordinatorEnded, now: float) -> Decision:
    if not job.alive:
        return _decision(job, f"{event.why}; nobody needs it")
    ran = f"{_alive_of(job, 'ran')}, in attempt {job.attempt}"
    # After a notice a death is a preemption.
    is_preempted = job.state is State.PREEMPTING and not job.grows
    kind = Preempted if is_preempted else WorkerFailed
    error = _error(job, kind, f"{event.why} while {ran}")
    # Nobody says any more how a save stands, and none can be committed: waiting is in vain.
    return _end_attempt(replace(job, saves={}), error, now)


def _on_stalled(job: Job, event: Stalled, now: float) -> Decision:
    """Ends an attempt that hangs, or refuses a rule that has no steps to go by."""
    if job.step < 0:
        message = f"{event.why}: {_STEPS_WANTED}"
        error = _error(job, StartupFailed, message, knob="stall_timeout_s")
        return _end_job(job, error, message, Kill())
    message = f"attempt {job.attempt} hangs: {event.why}"
    limit_s = job.policy.stall_timeout_s
    error = _error(
        job, Hang, message, processes=event.processes, timeout_s=limit_s, knob="stall_timeout_s"
    )
    # Who hangs before the latest save never comes to it, though it can report. Who has no client of
    # ours takes no part in it.
    latest = _latest_save(job)
    absent = {
        process
        for process in job.saves.keys() & (event.processes or job.alive)
        if job.saves[process].save < latest
    }
    return _end_attempt(replace(job, silent=(event.silent | absent) & job.alive), error, now)


def _on_progress(job: Job, event: Progressed, now: float) -> Decision:
    step = max(job.step, event.step)
    saved = max(job.saved_step, event.saved_step)
    # A job that saves gets on by saved steps alone: the others are lost with the attempt.
    better = saved > job.saved_step or (saved < 0 and step > job.step)
    job = replace(
        job,
        step=step,
        saved_step=saved,
        saves=event.saves or job.saves,
        leaving=job.leaving | event.leaving,
        restartable=job.restartable | event.restartable,
        held=job.held | event.held,
        reported_done=job.reported_done or event.done,
    )
    if not better:
        best = saved if saved >= 0 else step
        return _decision(job, f"step {event.step}: no progress beyond step {best}")
    # What has ended the job by itself still does; a budget that was used up is full again.
    if not job.stopping and job.why_final != str(job.error):
        job = replace(job, why_final="")
    job = replace(job, progressed=True, idle_attempts=0, budget_used={})
    return _decision(job, f"progress: step {step}, saved {saved}")


def _on_progress_while_running(job: Job, event: Progressed, now: float) -> Decision:
    decision = _on_progress(job, event, now)
    if not event.held:
        return decision
    # For a notice that is withdrawn by now: they wait all the same.
    why = f"{_who(event.held, 'has', 'have')} left the loop"
    return _preempt(job, decision.job, now, why)


def _on_notice(job: Job, event: Noticed, now: float) -> Decision:
    source = f"notice from {event.source}"
    # Most often the echo of our own notice: the processes leave in any case.
    is_echo = event.delivered and not (job.resize_to and GROWING not in event.source)
    if is_echo and job.grows:
        if event.deadline is not None and job.wake_at is not None:
            job = replace(job, wake_at=min(job.wake_at, event.deadline))
        return _decision(job, f"{source}, while all are leaving to come back as more")
    following = _add_notice(job, event)
    if event.delivered or job.state not in (State.RUNNING, State.REJOINING):
        return _preempt(job, following, now, source)
    # Whoever hears of it by itself cannot outlive it.
    alone = event.processes if job.alive <= job.restartable else None
    return _preempt(job, following, now, source, Notify(event.source, alone or None))


def _on_withdrawn(job: Job, event: Withdrawn, now: float) -> Decision:
    if event.source not in job.notices:
        return _decision(job, f"{event.source} had given no notice")
    others = {source: it for source, it in job.notices.items() if source != event.source}
    job = replace(job, notices=others)
    if others or job.stopping or job.exit_codes or job.held:
        if _all_left_well(job):
            job = replace(job, wake_at=_leave_by(job))
        hold = f"{counted(len(others), 'other')} {_verb(others, 'holds', 'hold')}"
        left = counted(len(job.exit_codes), "process")
        have = _verb(job.exit_codes, "has", "have")
        return _decision(job, f"{event.source} withdrew its notice; {hold}, {left} {have} left")
    job = replace(job, state=State.RUNNING, wake_at=None)
    return _decision(job, f"{event.source} withdrew the only notice", Unnotify())


def _on_capacity(job: Job, event: Capacity, now: float) -> Decision:
    room = f"room for {counted(event.num_processes, 'process')}"
    num_processes = min(event.num_processes, job.max_processes)
    stay = job.alive <= job.restartable and not job.exit_codes
    if num_processes < job.num_processes:
        leaving = frozenset[int]()
        if num_processes >= job.min_processes:
            job = replace(job, resize_to=num_processes)
            if stay:
                leaving = frozenset(range(num_processes, job.num_processes))
        return _on_notice(job, Noticed(f"{room} only", processes=leaving), now)
    # An attempt that is young has hardly begun to pay for its own start.
    young = now - job.started_at < job.policy.grow_after_s
    if num_processes == job.num_processes or young or job.exit_codes:
        return _decision(job, f"{room}, the job has {job.num_processes}")
    change = f"{room}, the job has {job.num_processes}: come back as {num_processes}"
    following = _add_notice(job, Noticed(GROWING))
    if stay:
        return _preempt(job, replace(following, resize_to=num_processes), now, change, Grow())
    return _preempt(job, following, now, change, Notify(GROWING))


def _on_stop(job: Job, event: Stop, now: float) -> Decision:
    job = replace(_add_notice(job, Noticed(event.source)), stopping=True)
    if not job.alive:
        error = _error(job, Preempted, f"asked to stop by {event.source} while {job.state}")
        return _end_job(job, error, str(error))
    if job.state is State.RESTARTING:
        reason = f"{event.source} while ending attempt {job.attempt}: no attempt follows"
        return _decision(job, reason)
    actions = () if job.state is State.PREEMPTING else (Notify(event.source),)
    why = f"asked to stop by {event.source}"
    if event.source == "SIGINT":
        why += ", Ctrl-C again ends them at once"
    return _preempt(job, job, now, why, *actions)


# --- Leaving after a notice


def _add_notice(job: Job, notice: Noticed) -> Job:
    earlier = job.notices.get(notice.source, notice)
    known = [at for at in (earlier.deadline, notice.deadline) if at is not None]
    notice = replace(notice, deadline=min(known, default=None))
    return replace(job, notices={**job.notices, notice.source: notice})


def _until(job: Job, at: float) -> float:
    """Returns `at`, or the earliest deadline of a notice, where that comes first."""
    known = (notice.deadline for notice in job.notices.values())
    return min([at, *(deadline for deadline in known if deadline is not None)])


def _leave_by(job: Job) -> float:
    return _until(job, job.leaving_since + job.policy.preemption_grace_s)


def _preempt(before: Job, job: Job, now: float, why: str, *actions: Action) -> Decision:
    """Goes to (or stays in) preempting; the earliest deadline of all notices wins."""
    if before.state is not State.PREEMPTING:
        job = replace(job, leaving_since=now, wake_at=None)
    deadline = _leave_by(job)
    # Those whom a failure has left less time get no more by another notice.
    if job.wake_at is not None:
        deadline = min(deadline, job.wake_at)
    job = replace(job, state=State.PREEMPTING, wake_at=deadline)
    if not job.alive:
        return _on_all_left(job, now)
    left = f"{_alive_of(job, 'has', 'have')} {max(0.0, deadline - now):.0f} s"
    return _once_held(_decision(job, f"{why}: {left} to save and leave", *actions), now)


def _on_exit_while_preempting(job: Job, event: Exited, now: float) -> Decision:
    job = _without(job, event)
    if event.code == DO_NOT_RESTART:
        return _end_attempt(job, _worker_error(job, event), now)
    if not job.alive:
        return _on_all_left(job, now)
    left = _alive_of(job, "is still there", "are still there")
    reason = f"process {event.process} {how_ended(event.code)}; {left}"
    if not _all_left_well(job):
        job, hurry = _hurry(job, now)
        reason += hurry
    return _once_held(_decision(job, reason), now)


def _once_held(decision: Decision, now: float) -> Decision:
    """Decides what becomes of the processes once all that live have left their training function:
    those without a notice of their own stay, where another attempt may follow.
    """
    job = decision.job
    waiting = job.alive & job.held
    # Who has no client of ours says nothing, and has yet to end.
    missing = job.alive & job.saves.keys() - job.held - job.leaving
    if not waiting or job.dismissed or missing:
        return decision
    staying = waiting - job.noticed
    all_can = job.alive <= (job.held & job.restartable) - job.leaving
    if staying and all_can and not job.reported_done:
        following = _rejoin_held(job, now, staying)
        if following.job.state is State.REJOINING:
            return following
    why = f"{_who(waiting, 'has', 'have')} left the loop, and nobody stays"
    return _decision(replace(job, dismissed=True), why, *decision.actions, Dismiss())


def _rejoin_held(job: Job, now: float, staying: frozenset[int]) -> Decision:
    left = _alive_of(job, "left the loop")
    if job.resizes:
        why = f"{left} to come back as {job.resize_to}"
        return _rejoin(replace(job, idle_attempts=_idle(job)), why, now, staying)
    message = f"{left} after notice from {_source(job)}"
    return _end_attempt(job, _error(job, Preempted, message), now, staying=staying)


def _hurry(job: Job, now: float) -> tuple[Job, str]:
    """Leaves the others less time to leave once a process has failed, and says how much.

    They may wait for the dead process in vain, in a save of all. Those of a save that can still be
    committed have `commit_grace_s`, where that is more. The deadline of the notice holds for all.
    """
    assert job.wake_at is not None
    if waiting := _committing(job):
        # No less than where there is nothing to commit: they have to leave, too.
        until = min(job.wake_at, now + max(job.policy.commit_grace_s, job.policy.grace_s))
        task = f"{until - now:.0f} s to end the save that can still be committed"
        return replace(job, wake_at=until), f"; {_some(waiting)} {task}"
    return replace(job, wake_at=min(job.wake_at, now + job.policy.grace_s)), ""


def _all_left_well(job: Job) -> bool:
    """Returns whether each process that is gone has left as a notice asks it to."""
    return all(code in _LEFT for code in job.exit_codes.values())


def _on_progress_while_preempting(job: Job, event: Progressed, now: float) -> Decision:
    decision = _on_progress(job, event, now)
    if not _all_left_well(job):
        # The save that they were given time for may be committed by now, or lost.
        job, _ = _hurry(decision.job, now)
        decision = _decision(job, decision.reason)
    return _once_held(decision, now)


def _on_all_left(job: Job, now: float) -> Decision:
    """Decides what an attempt has come to that had a notice, and whose processes have all left.

    It is done, is to have another size, or was preempted.
    """
    if job.reported_done and not any(job.exit_codes.values()):
        return _finish(job, f"{_everybody(job, 'has', 'have')} reported the end, and left")
    if job.resizes:
        following = _schedule(replace(job, idle_attempts=_idle(job)), now, ", as there is room")
        return replace(following, actions=(Release(), *following.actions))
    message = f"{_everybody(job, 'has', 'have')} left after notice from {_source(job)}"
    if failed := sorted(p for p, code in job.exit_codes.items() if code not in _LEFT):
        message += f"; process {failed[0]} {how_ended(job.exit_codes[failed[0]])}"
    return _end_attempt(job, _error(job, Preempted, message), now)


def _on_tick_while_preempting(job: Job, event: Tick, now: float) -> Decision:
    late = job.alive
    message = f"{_who(late, 'was', 'were')} still there at the deadline of the notice"
    error = _error(
        job, Preempted, message, processes=tuple(sorted(late)), knob="preemption_grace_s"
    )
    return _end_attempt(replace(job, killed=True), error, now)


# --- Replacing a process, while the others outlive the attempt


def _staying(job: Job, error: JobError) -> frozenset[int]:
    """Returns the processes that outlive the attempt that `error` ends."""
    has_begun = job.state in (State.RUNNING, State.REJOINING) and not job.notices
    is_death = bool(error.processes) and job.exit_codes.keys() >= set(error.processes)
    return _able(job, job.alive) if has_begun and is_death else frozenset()


def _able(job: Job, alive: frozenset[int]) -> frozenset[int]:
    """Returns those of the processes that can outlive the attempt: none, or all but for those that
    a replacement has only just started.
    """
    able = alive & (job.restartable | job.rejoining) - job.leaving - job.going
    all_can = alive - able <= (job.replaced - job.restartable) | job.going
    return able if all_can else frozenset()


def _on_unplaced(job: Job, event: Unplaced, now: float) -> Decision:
    """Has those that stay go on without those for whom there is no room, under numbers without a
    gap. The death that this comes from has been counted.
    """
    left = job.alive - event.processes
    staying = _able(job, left)
    too_few = not staying or len(left) < job.min_processes
    if too_few or job.surplus or job.exit_codes or job.notices:
        return _on_start_failed(job, StartFailed(event.attempt, event.why), now)
    numbers = tuple(sorted(left))

    def now_called(processes: frozenset[int]) -> frozenset[int]:
        return frozenset(renumbered(dict.fromkeys(processes), numbers))

    fewer = replace(
        job,
        alive=now_called(left),
        lives=renumbered(job.lives, numbers),
        held=now_called(job.going),  # as they have: these do not stay
        rejoining=now_called(job.rejoining),
        saving_before=now_called(job.saving_before),
        saves={},  # nobody can have saved before all have met
        resize_to=0,
    )
    why = f"{event.why}; {len(numbers)} of {counted(job.num_processes, 'process')} go on"
    return _rejoin(fewer, why, now, now_called(staying), numbers)


def _rejoin(
    job: Job,
    why: str,
    now: float,
    staying: frozenset[int],
    numbers_before: tuple[int, ...] = (),
) -> Decision:
    """Opens the next attempt at once: those that stay join it, and all others are started anew,
    those that still are to end once they have.
    """
    everybody = frozenset(range(_next_size(job)))
    going = job.alive & job.held - staying
    saving = _committing(job) & staying
    limit_s = job.policy.rejoin_timeout_s
    if saving - job.saving_before:
        limit_s = max(limit_s, job.policy.commit_grace_s)
    wake_at = now + limit_s
    if job.wake_at is not None and saving & job.saving_before:
        # The time of a save of an earlier attempt runs on.
        wake_at = max(wake_at, job.wake_at)
    following = replace(
        _next_attempt(job),
        state=State.REJOINING,
        alive=everybody,
        lives={process: job.lives[process] for process in staying | going},
        rejoining=staying | going,
        going=going,
        saving_before=saving,
        started_at=now,
        wake_at=wake_at,
    )
    following = _start_anew(following, everybody - staying - going)
    rejoin = Rejoin(
        following.attempt,
        len(everybody),
        staying | going,
        why,
        saving,
        going=going,
        numbers_before=numbers_before,
    )
    stay = f"{_who(staying, 'stays', 'stay')} for attempt {following.attempt}"
    new = f", {_list(everybody - staying)} new" if everybody - staying else ""
    gone = f", {_list(following.surplus)} not" if following.surplus else ""
    reason = f"{why}; {stay}{new}{gone}"
    return _decision(following, reason, rejoin, *_replace(following, following.replaced))


def _next_size(job: Job) -> int:
    """Returns how many an attempt has that processes stay for. It grows without another reason
    alone: where machines are given back, there may be no room for more.
    """
    if job.resize_to > job.num_processes and not job.grows:
        return job.num_processes
    return job.resize_to or job.num_processes


def _how_missed(job: Job, event: Exited) -> str:
    """Returns how a process that was to outlive an attempt has ended before all met in the next
    one, "" where it has not.
    """
    before = f"attempt {job.attempt - 1}"
    if event.process in job.going and event.code != DO_NOT_RESTART:
        return f"left {before}"
    if event.process in job.rejoining and event.code == DONE:
        return f"was done in {before}"  # the others need it to come to their own end
    if event.process in job.rejoining and event.code == STUCK:
        return f"could not leave {before}"
    # Where a machine is lost the ends of its processes come one by one.
    is_early = event.met < job.attempt and event.process in job.staying
    if is_early and event.code not in (*_LEFT, DO_NOT_RESTART):
        return f"{how_ended(event.code)} before all met in attempt {job.attempt}"
    return ""


def _replace_alone(job: Job, process: int, how: str) -> Decision:
    """Starts a process of the attempt anew. No other death has come: that takes of no budget, and
    at most once for each process of an attempt.
    """
    who = frozenset({process})
    again = ", and is started again" if process in job.alive else ""
    lost = _replace(job, who)
    job = _start_anew(job, who)
    if not job.rejoining:
        job = replace(job, state=State.RUNNING, wake_at=None)
    return _decision(job, f"process {process} {how}{again}", *lost)


def _replace(job: Job, processes: frozenset[int]) -> list[Replace]:
    """Returns the order to replace those of the processes that are to be in the attempt."""
    lost = processes & job.alive
    return [Replace(job.attempt, lost)] if lost else []


def _start_anew(job: Job, processes: frozenset[int]) -> Job:
    """Returns the job with another life of these processes, begun in this attempt, if it has their
    numbers.
    """
    new = processes & job.alive
    lives = {each: life for each, life in job.lives.items() if each not in processes}
    return replace(
        job,
        lives=lives | dict.fromkeys(new, job.attempt),
        replaced=job.replaced | new,
        rejoining=job.rejoining - processes,
        going=job.going - processes,
    )


def _end_surplus(before: Job, decision: Decision) -> Decision:
    """Ends those that leave, and whom nobody replaces, where nobody waits for them any more."""
    job = decision.job
    left = before.surplus if before.state is State.REJOINING else frozenset()
    if job.attempt == before.attempt:
        left &= frozenset() if job.state is State.REJOINING else job.surplus
        job = _start_anew(job, left)
    if not left:
        return decision
    return _decision(job, decision.reason, *decision.actions, Kill(left))


def _on_progress_while_rejoining(job: Job, event: Progressed, now: float) -> Decision:
    decision = _on_progress(job, event, now)
    job = decision.job
    back = job.rejoining.intersection(event.saves)
    # They say that they can stay once all have come.
    job = replace(job, rejoining=job.rejoining - back, restartable=job.restartable | back)
    if job.rejoining:
        return _decision(job, f"{_who(job.rejoining, 'is', 'are')} not back yet")
    reason = f"all that stayed are back, in attempt {job.attempt}"
    return _decision(replace(job, state=State.RUNNING, wake_at=None), reason)


def _on_tick_while_rejoining(job: Job, event: Tick, now: float) -> Decision:
    late = job.rejoining
    waited_s = now - job.started_at
    missed = f"come back in {waited_s:.0f} s: replaced"
    if not late & job.alive:
        missed = f"leave in {waited_s:.0f} s: ended"
    reason = f"{_who(late, 'did')} not {missed}"
    following = replace(_start_anew(job, late - job.surplus), state=State.RUNNING, wake_at=None)
    return _decision(following, reason, *_replace(job, late))


# --- Ending an attempt, and the next one. Ending is not preempting: nobody is asked to save.


def _committing(job: Job) -> frozenset[int]:
    """Returns the processes that the latest save needs, where it can still be committed.

    None of them may be ended yet. The save can be committed while nobody knows its end, if each
    process that is gone, or cannot report any more, had reported its share.
    """
    # Those that are back have come to the end of it.
    before = (job.saving_before & job.rejoining & job.alive).difference(job.saves)
    return (before | _committing_now(job)) - job.silent


def _latest_save(job: Job) -> int:
    """Returns the number of the latest save that a process of this attempt has begun."""
    processes = (*job.alive, *job.exit_codes)
    return max((job.saves.get(process, NO_SAVE).save for process in processes), default=-1)


def _committing_now(job: Job) -> frozenset[int]:
    """Returns those that a save of this attempt needs."""
    positions = {
        process: job.saves.get(process, NO_SAVE) for process in (*job.alive, *job.exit_codes)
    }
    latest = _latest_save(job)
    unheard = job.silent.union(job.exit_codes)
    if any(positions[process] < (latest, SaveStage.REPORTED) for process in unheard):
        return frozenset()
    if (latest, SaveStage.SETTLED) in positions.values():
        return frozenset()
    return job.alive.intersection(job.saves)


def _clear(job: Job) -> tuple[Job, tuple[Action, ...]]:
    """Ends at once each process that has nothing to do any more.

    A process without a client of ours may have something to do: it gets SIGTERM first. A process
    that is leaving has an exit code of its own to end with, and gets nothing.
    """
    free = job.alive - job.leaving - _committing(job)
    unknown = free.difference(job.saves)
    ready = free - unknown - job.killing
    asked = unknown - job.asked
    actions: list[Action] = []
    if ready:
        actions.append(Kill(ready))
    if asked:
        actions.append(Terminate(asked))
    return replace(job, killing=job.killing | ready, asked=job.asked | asked), tuple(actions)


def _end_attempt(
    job: Job,
    error: JobError,
    now: float,
    *,
    staying: frozenset[int] = frozenset(),
) -> Decision:
    """Ends the attempt with `error`; another follows, or the job fails.

    A save that can be committed is, unless all are `killed`. Those of `staying` may outlive it.
    """
    setting = _BUDGETS.get(type(error))
    if setting is None:
        return _end_last(job, error, str(error), now)
    if job.stopping:
        if not isinstance(error, Preempted):
            error = _error(job, Preempted, f"asked to stop by {_source(job)}; then {error}")
        reason = f"{error}; nothing is started again"
        return _end_last(job, error, reason, now)
    tries = job.budget_used.get(setting, 0) + 1
    idle = _idle(job)
    why = _why_last(job, setting, tries, idle)
    if why is not None:
        return _end_last(job, error, f"{error}{why}", now)
    budget_used = {**job.budget_used, setting: tries}
    following = replace(job, budget_used=budget_used, idle_attempts=idle, error=error)
    if staying := staying or _staying(job, error):
        return _rejoin(following, str(error), now, staying)
    return _retry(following, error, now)


def _why_last(job: Job, setting: str, tries: int, idle: int) -> str | None:
    """Returns what is added to the error where no attempt may follow, None where one may."""
    limit = int(getattr(job.policy, setting))
    if tries > limit:
        return f"; {setting}={limit} is used up" if limit else ""
    if job.step >= 0 and idle >= max(1, job.policy.attempts_without_progress):
        best = max(job.saved_step, job.step)
        return f"; {counted(idle, 'attempt')} in a row made no progress beyond step {best}"
    return None


def _end_last(job: Job, error: JobError, reason: str, now: float) -> Decision:
    """Ends the attempt, and the job with it.

    First come a save that can be committed, and those that are leaving.
    """
    if not job.killed and (_committing(job) or job.leaving & job.alive):
        return _end_processes(replace(job, error=error, why_final=reason), now, reason)
    cleared = (Kill(),) if job.killed else _clear(job)[1]
    return _end_job(job, error, reason, *cleared)


def _retry(job: Job, error: JobError, now: float) -> Decision:
    """Ends what is left of the attempt; another follows after a back-off."""
    budgets = job.budget_used.items()
    spent = ", ".join(f"{count} of {getattr(job.policy, name)} {name}" for name, count in budgets)
    if job.alive:
        count = len(job.alive)
        rest = "process that is left" if count == 1 else f"{count} processes that are left"
        left = f"ending the {rest}, then again"
        return _end_processes(job, now, f"{error}; {left} ({spent})")
    return _give_back(job, now, f"{error}", f" ({spent})")


def _give_back(job: Job, now: float, why: str, spent: str = "") -> Decision:
    """Ends an attempt of which nobody is left; the back-off begins."""
    wait_s = backoff_s(job)
    job = replace(job, state=State.RESTARTING, wake_at=now + wait_s)
    prepare = [PrepareNext(job.attempt + 1, job.num_processes)] if job.num_processes else []
    return _decision(job, f"{why}; again in {wait_s:.1f} s{spent}", Release(), *prepare)


def _end_processes(job: Job, now: float, reason: str) -> Decision:
    """Begins to end what is left of an attempt."""
    wake_at = now + job.policy.grace_s
    job = replace(job, state=State.RESTARTING, ending_since=now, wake_at=wake_at)
    if job.killed:
        return _decision(job, reason, Kill())
    # The machines go at the deadline of a notice, whatever has come since.
    job, actions = _clear(replace(job, wake_at=_until(job, wake_at)))
    if waiting := _committing(job):
        limit = f"{job.policy.commit_grace_s:g} s to end the save that can still be committed"
        reason += f"; {_some(waiting)} {limit}"
    return _decision(job, reason, *actions)


def _go_on_ending(job: Job, now: float, reason: str) -> Decision:
    """Ends those for whom nothing is left to do since something has happened."""
    if job.killed or not job.alive:
        return _decision(job, reason)
    job, actions = _clear(job)
    if not _committing(job):
        # Those that leave have this time; those that SIGKILL does not end, too.
        assert job.wake_at is not None
        job = replace(job, wake_at=min(job.wake_at, now + job.policy.grace_s))
    return _decision(job, reason, *actions)


def _on_exit_while_restarting(job: Job, event: Exited, now: float) -> Decision:
    is_counted = event.process in job.exit_codes
    job = _without(job, event)
    if event.code == DO_NOT_RESTART:
        # It had said so before it saw that another one failed, which came through first.
        error = _worker_error(job, event)
        job = replace(job, error=error, why_final=str(error))
    elif is_counted:
        # SIGKILL did not end it in time. The back-off has begun, and goes on.
        return _decision(job, f"process {event.process} of attempt {job.attempt} is gone at last")
    if not job.alive:
        return _back_off(job, now, f"attempt {job.attempt} is gone")
    return _go_on_ending(job, now, _alive_of(job, "is still to end", "are still to end"))


def _on_progress_while_restarting(job: Job, event: Progressed, now: float) -> Decision:
    decision = _on_progress(job, event, now)
    return _go_on_ending(decision.job, now, decision.reason)


def _on_coordinator_ended_while_restarting(
    job: Job, event: CoordinatorEnded, now: float
) -> Decision:
    if job.killed or not job.alive:
        return _decision(job, event.why)
    # No save can be committed any more. Those that leave by themselves still have their time.
    job = replace(job, silent=job.alive)
    return _go_on_ending(job, now, f"{event.why}: nobody says any more how the last save ends")


def _back_off(job: Job, now: float, why: str) -> Decision:
    assert job.error is not None
    if job.why_final:
        return _end_job(job, job.error, job.why_final, Kill())
    if job.stopping:
        error = _error(job, Preempted, f"asked to stop by {_source(job)}; before that {job.error}")
        return _end_job(job, error, str(error), Kill())
    # A process that even SIGKILL did not end counts as killed: the next attempt fences it off.
    codes = {**job.exit_codes, **dict.fromkeys(job.alive, -9)}
    return _give_back(replace(job, alive=frozenset(), exit_codes=codes), now, why)


def _on_tick_while_restarting(job: Job, event: Tick, now: float) -> Decision:
    if not job.alive:
        return _schedule(job, now, f", after {job.error}")
    late = _who(job.alive, "did")
    if job.killed:
        why = f"{late} not even end by SIGKILL; attempt {job.attempt} is fenced off"
        return _back_off(job, now, why)
    until = _until(job, job.ending_since + job.policy.commit_grace_s)
    waiting = _committing(job)
    if not waiting or now >= until:
        reason = f"{late} not end in {now - job.ending_since:g} s"
        job = replace(job, killed=True, wake_at=now + job.policy.grace_s)
        return _decision(job, reason, Kill())
    others = job.alive - waiting
    actions = (Kill(others),) if others else ()
    job = replace(job, wake_at=until)
    return _decision(job, _who(waiting, "still saves", "still save"), *actions)


def _end_job(job: Job, error: JobError, reason: str, *actions: Action) -> Decision:
    state = State.PREEMPTED if isinstance(error, Preempted) else State.FAILED
    following = replace(
        job, state=state, error=error, exit_code=_exit_code(job, error), wake_at=None
    )
    if not job.alive:
        actions = ()
    return _decision(following, reason, *actions, Release())


def _exit_code(job: Job, error: JobError) -> int:
    if not isinstance(error, WorkerFailed):
        return {Preempted: PREEMPTED, Hang: HANG, Fatal: DO_NOT_RESTART}.get(type(error), 1)
    # What the others ended with since then does not count.
    failed = [job.exit_codes[process] for process in error.processes if process in job.exit_codes]
    code = failed[0] if failed else 1
    return code if code >= 0 else 128 - code


# --- Helpers


def _idle(job: Job) -> int:
    """Returns how many attempts in a row made no progress, the one that ends now included."""
    ran = job.state is not State.SCHEDULING
    return job.idle_attempts + (ran and not job.progressed)


def _without(job: Job, event: Exited) -> Job:
    if event.process not in job.alive:
        return _start_anew(job, frozenset({event.process}) & job.surplus)
    return replace(
        job,
        alive=job.alive - {event.process},
        exit_codes={**job.exit_codes, event.process: event.code},
        rejoining=job.rejoining - {event.process},
    )


def _worker_error(job: Job, event: Exited) -> JobError:
    where = f"process {event.process} of {job.num_processes}"
    message = f"{where} {how_ended(event.code)} in attempt {job.attempt}"
    if event.why:
        message += f": {event.why}"
    kind = {DO_NOT_RESTART: Fatal, HANG: Hang}.get(event.code, WorkerFailed)
    return _error(job, kind, message, processes=(event.process,))


def _error(job: Job, kind: type[JobError], message: str, **fields: Any) -> JobError:
    if kind is Preempted and _unsaved(job) not in message:
        message += _unsaved(job)
    return kind(message, **({"attempt": job.attempt, "knob": _BUDGETS.get(kind, "")} | fields))


def _unsaved(job: Job) -> str:
    """Returns what is added to the word that a job is preempted, where that loses steps."""
    if job.saved_step >= job.step:
        return ""
    saved = "no step was reported as saved"
    if job.saved_step >= 0:
        saved = f"the last saved step is {job.saved_step}"
    return f"; {saved}, the job was at {job.step}"


def _source(job: Job) -> str:
    """Returns whose notice came first: what processes report after it is mostly its echo."""
    return next((source for source in job.notices if source != GROWING), "a notice")


def _verb(those: Sized, one: str, several: str) -> str:
    return one if len(those) == 1 or not several else several


def _alive_of(job: Job, one: str, several: str = "") -> str:
    """Returns how many processes of an attempt live, with the verb that fits."""
    alive = f"{len(job.alive):,} of {counted(job.num_processes, 'process')}"
    return f"{alive} {_verb(job.alive, one, several)}"


def _everybody(job: Job, one: str, several: str) -> str:
    """Returns all processes of an attempt, with the verb that fits."""
    count = job.num_processes
    return f"the only process {one}" if count == 1 else f"all {count} processes {several}"


def _some(waiting: Sized) -> str:
    return f"{len(waiting)} of them {_verb(waiting, 'has', 'have')}"


def _who(processes: Set[int], one: str, several: str = "") -> str:
    """Returns processes by their numbers, with the verb that fits."""
    names = f"{_verb(processes, 'process', 'processes')} {_list(processes)}"
    return f"{names} {_verb(processes, one, several)}"


def _list(processes: Set[int]) -> str:
    return ", ".join(map(str, sorted(processes)))


_Handlers: TypeAlias = Mapping[type[Event], Callable[[Job, Any, float], Decision]]

_AT_ANY_TIME: _Handlers = {Stop: _on_stop}
_WHILE_ALIVE: _Handlers = {
    **_AT_ANY_TIME,
    Exited: _on_exit_while_running,
    StartFailed: _on_start_failed,
    Unplaced: _on_unplaced,
    Noticed: _on_notice,
    CoordinatorEnded: _on_coordinator_ended,
    Stalled: _on_stalled,
}
_TABLE: Mapping[State, _Handlers] = {
    State.INITIALIZING: {**_AT_ANY_TIME, Start: _on_start},
    State.SCHEDULING: {
        **_AT_ANY_TIME,
        Reserved: _on_reserved,
        Waiting: _on_waiting,
        Tick: _on_tick_while_scheduling,
        StartFailed: _on_start_failed,
    },
    State.RUNNING: {
        **_WHILE_ALIVE,
        Progressed: _on_progress_while_running,
        Capacity: _on_capacity,
    },
    State.REJOINING: {
        **_WHILE_ALIVE,
        Progressed: _on_progress_while_rejoining,
        Tick: _on_tick_while_rejoining,
    },
    State.PREEMPTING: {
        **_AT_ANY_TIME,
        Exited: _on_exit_while_preempting,
        CoordinatorEnded: _on_coordinator_ended,
        Noticed: _on_notice,
        Withdrawn: _on_withdrawn,
        Progressed: _on_progress_while_preempting,
        Tick: _on_tick_while_preempting,
    },
    State.RESTARTING: {
        **_AT_ANY_TIME,
        Exited: _on_exit_while_restarting,
        Progressed: _on_progress_while_restarting,
        CoordinatorEnded: _on_coordinator_ended_while_restarting,
        Tick: _on_tick_while_restarting,
    },
}

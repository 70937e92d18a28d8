"""Decides what happens to a job: one pure function, `decide(job, event, now)`, with no clock,
thread, process or socket.

    initializing -> scheduling -> running -> finished scheduling -> rescheduling -> scheduling
    starting failed or took too long, while its budget lasts running -> restarting -> scheduling
    a process died or hangs, while its budget lasts running -> preempting -> restarting ->
    scheduling a notice: save, leave, come back running -> resizing -> scheduling
    more capacity is there any -> failed                                     a budget is spent, no
    progress, exit code 93, or asked to stop

Engines (this machine, Ray, Slurm) report events and carry out actions; they decide nothing. After a
notice an exit code of 0 does not mean done, unless the training loop reported so: the job comes
back, finds its last step, and ends at once if nothing is left to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    Action,
    Capacity,
    CoordinatorEnded,
    Decision,
    Event,
    Exited,
    Job,
    Kill,
    Launch,
    Notice,
    Notify,
    Prepare,
    Progress,
    Release,
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
    Waiting,
    Withdrawn,
)

# Which setting of RestartPolicy is the budget of an error. Fatal has none.
_BUDGETS: dict[type[JobError], str] = {
    StartupTimeout: "max_startup_timeouts",
    StartupFailed: "max_startup_failures",
    Preempted: "max_preemptions",
    WorkerFailed: "max_failures",
    Hang: "max_failures",
}

_STEPS_WANTED = (
    "stall_timeout_s goes by steps; call multihost.reached_preemption(step),"
    " manager.should_save(step) or group.report(step=step) in the training loop, give"
    " startup_timeout_s more seconds where the first step takes so long, or leave"
    " stall_timeout_s out"
)


def decide(job: Job, event: Event, now: float) -> Decision:
    """Returns what `event` at `now` makes of `job`, the actions to carry out, and the reason. Pure
    and total.
    """
    if job.final:
        return _decision(job, f"the job is {job.state}")
    of_attempt = Reserved | Waiting | StartFailed | CoordinatorEnded | Exited | Progress | Stalled
    if isinstance(event, of_attempt) and event.attempt != job.attempt:
        return _decision(job, f"an event of attempt {event.attempt}, now at {job.attempt}")
    handler = _TABLE.get((job.state, type(event)))
    return (
        handler(job, event, now)
        if handler
        else _decision(job, f"nothing to do for {type(event).__name__} while {job.state}")
    )


def backoff_s(job: Job) -> float:
    """Returns how long to wait before the next attempt: exponential, capped, with a jitter drawn
    from (job, attempt).
    """
    policy = job.policy
    tries = max(0, sum(job.budget_used.values()) - 1)
    base = min(policy.backoff_cap_s, policy.backoff_s * 2.0 ** min(tries, 32))
    return base * (
        1 - policy.backoff_jitter * random.Random(f"{job.job_id}/{job.attempt}").random()
    )


def _decision(job: Job, reason: str, *actions: Action) -> Decision:
    return Decision(job, actions, reason)


# --- Starting


def _schedule(job: Job, now: float, why: str) -> Decision:
    attempt = job.attempt + 1
    following = replace(
        job,
        state=State.SCHEDULING,
        attempt=attempt,
        alive=frozenset(),
        exit_codes={},
        notices={},
        progressed=False,
        saves={},
        silent=frozenset(),
        killing=frozenset(),
        asked=frozenset(),
        killed=False,
        why_waiting="",
        error=None,
        wake_at=now + job.policy.startup_timeout_s,
    )
    wanted = (
        f"{job.min_processes} to {job.max_processes}"
        if job.min_processes < job.max_processes
        else f"{job.max_processes}"
    )
    reserve = Reserve(attempt, job.min_processes, job.max_processes, job.policy.startup_timeout_s)
    return _decision(following, f"{why}: attempt {attempt} asks for {wanted} processes", reserve)


def _on_start(job: Job, event: Start, now: float) -> Decision:
    return _schedule(job, now, "start")


def _on_reserved(job: Job, event: Reserved, now: float) -> Decision:
    num_processes = min(event.num_processes, job.max_processes)
    if num_processes < job.min_processes:
        return _decision(
            job,
            f"room for {num_processes} of at least {job.min_processes} processes: still waiting",
        )
    following = replace(
        job,
        state=State.RUNNING,
        alive=frozenset(range(num_processes)),
        started_at=now,
        wake_at=None,
    )
    return _decision(
        following,
        f"attempt {job.attempt} starts with {num_processes} processes",
        Launch(job.attempt, num_processes),
    )


def _on_waiting(job: Job, event: Waiting, now: float) -> Decision:
    return _decision(
        replace(job, why_waiting=event.why), f"attempt {job.attempt} waits: {event.why}"
    )


def _on_tick_while_scheduling(job: Job, event: Tick, now: float) -> Decision:
    if job.wake_at is None or now < job.wake_at:
        return _decision(job, "still waiting for machines")
    limit_s = job.policy.startup_timeout_s
    message = f"no room for {job.min_processes} processes within {limit_s:g} s" + (
        f": {job.why_waiting}" if job.why_waiting else ""
    )
    return _end_attempt(
        job, _error(job, StartupTimeout, message, timeout_s=limit_s, knob="startup_timeout_s"), now
    )


def _on_start_failed(job: Job, event: StartFailed, now: float) -> Decision:
    if event.final:
        return _end_job(job, _error(job, StartupFailed, event.why), event.why, Kill())
    return _end_attempt(
        job, _error(job, StartupFailed, f"attempt {job.attempt} could not start: {event.why}"), now
    )


# --- Running


def _on_exit_while_running(job: Job, event: Exited, now: float) -> Decision:
    job = _without(job, event)
    if event.code == DONE:
        if job.alive:
            return _decision(
                job,
                f"process {event.process} is done; {len(job.alive)} of {job.num_processes}"
                " still run",
            )
        following = replace(job, state=State.FINISHED, wake_at=None)
        return _decision(
            following,
            f"all {job.num_processes} processes are done, attempt {job.attempt}",
            Release(),
        )
    if event.code == PREEMPTED:
        return _preempt(
            job,
            _add_notice(job, f"process {event.process}", None),
            now,
            f"process {event.process} left as preempted",
        )
    return _end_attempt(job, _worker_error(job, event), now)


def _on_coordinator_ended(job: Job, event: CoordinatorEnded, now: float) -> Decision:
    if not job.alive:
        return _decision(job, f"{event.why}; nobody needs it")
    message = (
        f"{event.why} while {len(job.alive)} of {job.num_processes} processes ran, in attempt"
        f" {job.attempt}"
    )
    return _end_attempt(
        replace(job, saves={}), _error(job, WorkerFailed, message), now
    )  # nobody says any more how a save stands


def _on_stalled(job: Job, event: Stalled, now: float) -> Decision:
    """Ends an attempt that hangs, or refuses a rule that has no steps to go by."""
    if job.step < 0:
        message = f"{event.why}: {_STEPS_WANTED}"
        return _end_job(
            job, _error(job, StartupFailed, message, knob="stall_timeout_s"), message, Kill()
        )
    message = f"attempt {job.attempt} hangs: {event.why}"
    limit_s = job.policy.stall_timeout_s
    error = _error(
        job, Hang, message, processes=event.processes, timeout_s=limit_s, knob="stall_timeout_s"
    )
    return _end_attempt(replace(job, silent=event.silent & job.alive), error, now)


def _on_progress(job: Job, event: Progress, now: float) -> Decision:
    step, saved = max(job.step, event.step), max(job.saved_step, event.saved_step)
    job = replace(job, saves=event.saves or job.saves)
    better = saved > job.saved_step or (saved < 0 and step > job.step)
    job = replace(job, step=step, saved_step=saved, reported_done=job.reported_done or event.done)
    if not better:
        return _decision(
            job, f"step {event.step}: no progress beyond step {saved if saved >= 0 else step}"
        )
    return _decision(
        replace(job, progressed=True, idle_attempts=0, budget_used={}),
        f"progress: step {step}, saved {saved}",
    )


def _on_notice(job: Job, event: Notice, now: float) -> Decision:
    if (
        event.delivered and job.state is State.RESIZING
    ):  # the echo of our own notice; they leave in any case
        return _decision(
            job, f"notice from {event.source}, while all are leaving to come back as more"
        )
    following = _add_notice(job, event.source, event.deadline)
    actions = () if event.delivered or job.state is not State.RUNNING else (Notify(event.source),)
    return _preempt(job, following, now, f"notice from {event.source}", *actions)


def _on_withdrawn(job: Job, event: Withdrawn, now: float) -> Decision:
    if event.source not in job.notices:
        return _decision(job, f"{event.source} had given no notice")
    job = replace(
        job, notices={source: at for source, at in job.notices.items() if source != event.source}
    )
    if job.notices or job.stopping or job.exit_codes:
        return _decision(
            job,
            f"{event.source} withdrew its notice; {len(job.notices)} others hold,"
            f" {len(job.exit_codes)} processes have left",
        )
    return _decision(
        replace(job, state=State.RUNNING, wake_at=None),
        f"{event.source} withdrew the only notice",
        Unnotify(),
    )


def _on_capacity(job: Job, event: Capacity, now: float) -> Decision:
    num_processes = min(event.num_processes, job.max_processes)
    if num_processes < job.num_processes:
        return _on_notice(job, Notice(f"room for {event.num_processes} processes only"), now)
    if (
        num_processes == job.num_processes
        or now - job.started_at < job.policy.grow_after_s
        or job.exit_codes
    ):
        return _decision(job, f"room for {event.num_processes} processes, {job.num_processes} run")
    following = replace(job, state=State.RESIZING, wake_at=now + job.policy.preemption_grace_s)
    reason = (
        f"room for {event.num_processes} processes, {job.num_processes} run: save, leave and come"
        f" back as {num_processes}"
    )
    return _decision(following, reason, Notify("growing"))


def _on_stop(job: Job, event: Stop, now: float) -> Decision:
    job = replace(job, stopping=True)
    if not job.alive:
        error = _error(job, Preempted, f"asked to stop by {event.source} while {job.state}")
        return _end_job(job, error, f"{event.source} while {job.state}, no process runs")
    if job.state is State.RESTARTING:
        return _decision(
            job, f"{event.source} while ending attempt {job.attempt}: no attempt follows"
        )
    actions = () if job.state in (State.PREEMPTING, State.RESIZING) else (Notify(event.source),)
    return _preempt(
        job, _add_notice(job, event.source, None), now, f"asked to stop by {event.source}", *actions
    )


# --- Leaving: preempting and resizing


def _add_notice(job: Job, source: str, deadline: float | None) -> Job:
    known = job.notices.get(source)
    merged = deadline if known is None else known if deadline is None else min(known, deadline)
    return replace(job, notices={**job.notices, source: merged})


def _preempt(before: Job, job: Job, now: float, why: str, *actions: Action) -> Decision:
    """Goes to (or stays in) preempting; the earliest deadline of all notices wins."""
    deadlines = [at for at in job.notices.values() if at is not None]
    if before.state in (State.PREEMPTING, State.RESIZING) and before.wake_at is not None:
        deadlines.append(before.wake_at)
    else:
        deadlines.append(now + job.policy.preemption_grace_s)
    job = replace(job, state=State.PREEMPTING, wake_at=min(deadlines))
    if not job.alive:
        return _on_all_left(job, now)
    assert job.wake_at is not None
    return _decision(
        job,
        f"{why}: {len(job.alive)} of {job.num_processes} processes have"
        f" {max(0.0, job.wake_at - now):.0f} s to save and leave",
        *actions,
    )


def _on_exit_while_preempting(job: Job, event: Exited, now: float) -> Decision:
    job = _without(job, event)
    if event.code == DO_NOT_RESTART:
        return _end_attempt(job, _worker_error(job, event), now)
    if not job.alive:
        return _on_all_left(job, now)
    if event.code not in (DONE, PREEMPTED):  # the others may wait for it in vain
        assert job.wake_at is not None
        job = replace(job, wake_at=min(job.wake_at, now + job.policy.grace_s))
    return _decision(
        job,
        f"process {event.process} left with exit code {event.code}; {len(job.alive)} of"
        f" {job.num_processes} still there",
    )


def _on_all_left(job: Job, now: float) -> Decision:
    """Decides whether an attempt that had a notice, and whose processes have all left, is done, to
    be resized, or preempted.
    """
    if job.reported_done and not any(job.exit_codes.values()):
        following = replace(job, state=State.FINISHED, wake_at=None)
        return _decision(
            following,
            f"all {job.num_processes} processes reported that they are done, and left",
            Release(),
        )
    if job.state is State.RESIZING and not job.stopping:
        return _retry(job, replace(job, idle_attempts=_idle(job)), now, None)
    sources = ", ".join(job.notices) or "a notice"
    return _end_attempt(
        job,
        _error(
            job, Preempted, f"all {job.num_processes} processes left after notice from {sources}"
        ),
        now,
    )


def _on_tick_while_preempting(job: Job, event: Tick, now: float) -> Decision:
    if job.wake_at is None or now < job.wake_at:
        return _decision(
            job, f"{len(job.alive)} of {job.num_processes} processes still have time to leave"
        )
    remaining = tuple(sorted(job.alive))
    message = f"processes {_list(remaining)} were still there at the deadline of the notice"
    return _end_attempt(
        job,
        _error(job, Preempted, message, processes=remaining, knob="preemption_grace_s"),
        now,
        patient=False,
    )


# --- Ending an attempt, and the next one. Ending is not preempting: nobody is asked to save.


def _committing(job: Job) -> frozenset[int]:
    """Returns the processes that the latest save needs, where it can still be committed: none of
    them may be ended yet.

    It can be while nobody knows its end, if each process that is gone, or cannot report any more,
    had reported its share.
    """
    positions = {
        process: job.saves.get(process, NO_SAVE) for process in (*job.alive, *job.exit_codes)
    }
    latest = max((position.save for position in positions.values()), default=-1)
    if any(
        positions[process] < (latest, SaveStage.REPORTED)
        for process in job.exit_codes.keys() | job.silent
    ):
        return frozenset()
    return (
        frozenset()
        if (latest, SaveStage.SETTLED) in positions.values()
        else (job.alive - job.silent) & job.saves.keys()
    )


def _clear(job: Job) -> tuple[Job, tuple[Action, ...]]:
    """Ends at once whoever has nothing to do any more. Who has no client of ours may have
    something: it gets SIGTERM first.
    """
    unknown = job.alive - job.saves.keys()
    ready = job.alive - unknown - _committing(job) - job.killing
    asked = unknown - job.asked
    actions: list[Action] = [Kill(ready)] if ready else []
    if asked:
        actions.append(Terminate(asked))
    return replace(job, killing=job.killing | ready, asked=job.asked | asked), tuple(actions)


def _end_attempt(job: Job, error: JobError, now: float, *, patient: bool = True) -> Decision:
    """Ends the attempt with `error`; another follows, or the job fails. `patient`: a save that can
    be committed is.
    """
    setting = _BUDGETS.get(type(error))
    if setting is None:
        return _end_last(job, error, str(error), now, patient)
    if job.stopping:
        stopped = (
            error
            if isinstance(error, Preempted)
            else _error(job, Preempted, f"asked to stop; then {error}")
        )
        return _end_last(job, stopped, "asked to stop: nothing is started again", now, patient)
    used, limit = job.budget_used.get(setting, 0) + 1, int(getattr(job.policy, setting))
    idle = _idle(job)
    if used > limit:
        return _end_last(
            job,
            error,
            f"{error}; {setting}={limit} is used up" if limit else str(error),
            now,
            patient,
        )
    if job.step >= 0 and idle >= max(1, job.policy.attempts_without_progress):
        why = (
            f"{error}; {idle} attempts in a row made no progress beyond step"
            f" {max(job.saved_step, job.step)}"
        )
        return _end_last(job, error, why, now, patient)
    return _retry(
        job,
        replace(
            job, budget_used={**job.budget_used, setting: used}, idle_attempts=idle, error=error
        ),
        now,
        error,
        patient,
    )


def _end_last(job: Job, error: JobError, reason: str, now: float, patient: bool) -> Decision:
    """Ends the attempt, and the job with it; first a save that can be committed."""
    if patient and _committing(job):
        return _end_processes(replace(job, error=error, why_final=reason), now, reason, patient)
    cleared = _clear(job)[1] if patient else (Kill(),)
    return _end_job(job, error, reason, *cleared)


def _retry(
    before: Job, job: Job, now: float, error: JobError | None, patient: bool = True
) -> Decision:
    if error is None:
        return _then(_schedule(job, now, "resizing"), Release())
    wait_s = backoff_s(job)
    spent = ", ".join(
        f"{used} of {getattr(job.policy, setting)} {setting}"
        for setting, used in job.budget_used.items()
    )
    if not job.alive:
        startup = before.state is State.SCHEDULING
        job = replace(
            job, state=State.RESCHEDULING if startup else State.RESTARTING, wake_at=now + wait_s
        )
        prepare = () if startup else (Prepare(job.attempt + 1, job.num_processes),)
        return _decision(job, f"{error}; again in {wait_s:.1f} s ({spent})", Release(), *prepare)
    return _end_processes(
        job,
        now,
        f"{error}; ending the {len(job.alive)} processes that are left, then again ({spent})",
        patient,
    )


def _end_processes(job: Job, now: float, reason: str, patient: bool) -> Decision:
    """Begins to end what is left of an attempt."""
    job = replace(
        job,
        state=State.RESTARTING,
        ending_since=now,
        wake_at=now + job.policy.grace_s,
        killed=not patient,
    )
    if not patient:
        return _decision(job, reason, Kill())
    job, actions = _clear(job)
    if waiting := _committing(job):
        reason += (
            f"; {len(waiting)} of them have {job.policy.commit_grace_s:g} s to end the save that"
            " can still be committed"
        )
    return _decision(job, reason, *actions)


def _go_on_ending(job: Job, reason: str) -> Decision:
    """Ends those for whom nothing is left to do since something has happened."""
    if job.killed:
        return _decision(job, reason)
    job, actions = _clear(job)
    return _decision(job, reason, *actions)


def _on_exit_while_restarting(job: Job, event: Exited, now: float) -> Decision:
    job = _without(job, event)
    if job.alive:
        return _go_on_ending(
            job, f"{len(job.alive)} of {job.num_processes} processes are still to end"
        )
    return _back_off(job, now, f"attempt {job.attempt} is gone")


def _on_progress_while_restarting(job: Job, event: Progress, now: float) -> Decision:
    decision = _on_progress(job, event, now)
    return _go_on_ending(decision.job, decision.reason)


def _on_coordinator_ended_while_restarting(
    job: Job, event: CoordinatorEnded, now: float
) -> Decision:
    if job.killed or not job.alive:
        return _decision(job, event.why)
    return _kill_the_rest(job, now, f"{event.why}: nobody says any more how the last save ends")


def _back_off(job: Job, now: float, why: str) -> Decision:
    assert job.error is not None
    if job.why_final:
        return _end_job(job, job.error, job.why_final, Kill())
    if job.stopping:
        return _end_job(
            job, _error(job, Preempted, f"asked to stop; before that {job.error}"), why, Kill()
        )
    wait_s = backoff_s(job)
    following = replace(
        job,
        alive=frozenset(),
        exit_codes={**job.exit_codes, **dict.fromkeys(job.alive, -9)},
        wake_at=now + wait_s,
    )
    return _decision(
        following,
        f"{why}; again in {wait_s:.1f} s",
        Release(),
        Prepare(job.attempt + 1, job.num_processes),
    )


def _on_tick_while_restarting(job: Job, event: Tick, now: float) -> Decision:
    if job.wake_at is None or now < job.wake_at:
        return _decision(job, "not yet")
    if not job.alive:
        return _schedule(job, now, f"after {job.error}")
    if job.killed:
        return _back_off(
            job,
            now,
            f"processes {_list(job.alive)} did not even end by SIGKILL; their attempt is"
            " fenced off",
        )
    waiting, until = _committing(job), job.ending_since + job.policy.commit_grace_s
    if waiting and now < until:
        late = job.alive - waiting
        return _decision(
            replace(job, wake_at=until),
            f"processes {_list(waiting)} still save",
            *([Kill(late)] if late else []),
        )
    return _kill_the_rest(
        job, now, f"processes {_list(job.alive)} have not ended in {now - job.ending_since:g} s"
    )


def _kill_the_rest(job: Job, now: float, reason: str) -> Decision:
    return _decision(replace(job, killed=True, wake_at=now + job.policy.grace_s), reason, Kill())


def _end_job(job: Job, error: JobError, reason: str, *actions: Action) -> Decision:
    if isinstance(error, WorkerFailed):
        code = next((code for code in job.exit_codes.values() if code not in (DONE, PREEMPTED)), 1)
        code = 128 - code if code < 0 else code
    else:
        code = {Preempted: PREEMPTED, Hang: HANG, Fatal: DO_NOT_RESTART}.get(type(error), 1)
    actions = tuple(action for action in actions if job.alive)
    following = replace(job, state=State.FAILED, error=error, exit_code=code, wake_at=None)
    return _decision(following, reason, *actions, Release())


# --- Helpers


def _idle(job: Job) -> int:
    """Returns how many attempts in a row made no progress, the one that ends now included."""
    ran = job.state is not State.SCHEDULING
    return job.idle_attempts + (ran and not job.progressed)


def _without(job: Job, event: Exited) -> Job:
    if event.process not in job.alive:
        return job
    return replace(
        job,
        alive=job.alive - {event.process},
        exit_codes={**job.exit_codes, event.process: event.code},
    )


def _worker_error(job: Job, event: Exited) -> JobError:
    ending = (
        f"was ended by signal {-event.code}"
        if event.code < 0
        else f"ended with exit code {event.code}"
    )
    message = (
        f"process {event.process} of {job.num_processes} {ending} in attempt {job.attempt}"
        + (f": {event.why}" if event.why else "")
    )
    kind = {DO_NOT_RESTART: Fatal, HANG: Hang}.get(event.code, WorkerFailed)
    return _error(job, kind, message, processes=(event.process,))


def _error(job: Job, kind: type[JobError], message: str, **fields: Any) -> JobError:
    return kind(message, **({"attempt": job.attempt, "knob": _BUDGETS.get(kind, "")} | fields))


def _then(decision: Decision, *before: Action) -> Decision:
    return Decision(decision.job, before + decision.actions, decision.reason)


def _list(processes: frozenset[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(processes)))


_TABLE: dict[tuple[State, type], Callable[[Job, Any, float], Decision]] = {
    (State.INITIALIZING, Start): _on_start,
    (State.SCHEDULING, Reserved): _on_reserved,
    (State.SCHEDULING, Waiting): _on_waiting,
    (State.SCHEDULING, Tick): _on_tick_while_scheduling,
    (State.SCHEDULING, StartFailed): _on_start_failed,
    (State.RESCHEDULING, Tick): _on_tick_while_restarting,
    (State.RUNNING, Exited): _on_exit_while_running,
    (State.RUNNING, StartFailed): _on_start_failed,
    (State.RUNNING, Notice): _on_notice,
    (State.RUNNING, Capacity): _on_capacity,
    (State.RUNNING, CoordinatorEnded): _on_coordinator_ended,
    (State.RUNNING, Stalled): _on_stalled,
    (State.PREEMPTING, Exited): _on_exit_while_preempting,
    (State.PREEMPTING, Notice): _on_notice,
    (State.PREEMPTING, Withdrawn): _on_withdrawn,
    (State.PREEMPTING, Tick): _on_tick_while_preempting,
    (State.RESIZING, Exited): _on_exit_while_preempting,
    (State.RESIZING, Notice): _on_notice,
    (State.RESIZING, Tick): _on_tick_while_preempting,
    (State.RESTARTING, Exited): _on_exit_while_restarting,
    (State.RESTARTING, Tick): _on_tick_while_restarting,
    **{(state, Stop): _on_stop for state in State},
    (State.RESTARTING, Progress): _on_progress_while_restarting,
    (State.RESTARTING, CoordinatorEnded): _on_coordinator_ended_while_restarting,
    **{
        (state, Progress): _on_progress
        for state in (State.RUNNING, State.PREEMPTING, State.RESIZING)
    },
}

"""Notices: their deadlines hold for all, and nobody is lost with them."""

from __future__ import annotations

import math

from holdfast.launch import Fatal
from holdfast.launch.supervisor.goodput import LIVES
from holdfast.launch.supervisor.job import (
    Noticed,
    Notify,
    Progressed,
    State,
    Stop,
    Unnotify,
    Withdrawn,
)

from .reading import CLOSE_S, GOES, Broken, actions, is_failure, is_own
from .sparing import is_known_to_be_over
from .trace import Step, Trace


def a_deadline_holds_for_all(trace: Trace) -> Broken:
    """After the deadline of a notice nobody runs that has not been sent SIGKILL."""
    for attempt in trace.attempts():
        deadlines: dict[str, float] = {}
        killed: frozenset[int] = frozenset()
        for step in attempt:
            _take_deadline(step, deadlines)
            killed |= step.killed
            at = min(deadlines.values(), default=math.inf)
            left = step.after.alive & step.seen.alive - killed
            if left and step.now > at + CLOSE_S:
                yield f"leaves {sorted(left)} alive after the deadline at {at:.2f}: {step}"


def _take_deadline(step: Step, deadlines: dict[str, float]) -> None:
    event = step.event
    is_taken = step.before.state in LIVES and is_own(step)
    if isinstance(event, Noticed) and is_taken and event.deadline is not None:
        # One that has passed holds from now on.
        at = max(step.now, event.deadline)
        deadlines[event.source] = min(at, deadlines.get(event.source, math.inf))
    if isinstance(event, Withdrawn):
        deadlines.pop(event.source, None)


def leaving_has_its_time(trace: Trace) -> Broken:
    """After a notice nobody gets SIGKILL before its deadline, or `grace_s` after a failure.

    Without a deadline the processes have `preemption_grace_s`.
    """
    for attempt in trace.attempts():
        began = math.inf
        failed = math.inf
        deadlines: dict[str, float] = {}
        for step in attempt:
            policy = step.before.policy
            _take_deadline(step, deadlines)
            if step.after.state in GOES and step.before.state not in GOES:
                began = step.now
            at = min(failed, began + policy.preemption_grace_s, *deadlines.values())
            if step.before.state not in GOES:
                continue
            if step.killed and step.now < at - CLOSE_S and not _is_fatal(step):
                yield f"ends {sorted(step.killed)} before {at:.2f}: {step}"
            if is_failure(step):
                failed = min(at, step.now + policy.grace_s)


def _is_fatal(step: Step) -> bool:
    return isinstance(step.after.error, Fatal)


def a_failure_leaves_less_time(trace: Trace) -> Broken:
    """After a failure the others have `grace_s` to leave, or as long as a save needs them."""
    for attempt in trace.attempts():
        until = math.inf
        failed = False
        for step in attempt:
            policy = step.before.policy
            goes = step.before.state in GOES
            if goes and step.now > until + CLOSE_S:
                yield f"still waits after {until:.2f}: {step}"
            failed |= goes and is_failure(step)
            if goes and is_failure(step):
                until = min(until, step.now + max(policy.grace_s, policy.commit_grace_s))
            if failed and is_known_to_be_over(step):
                until = min(until, step.now + policy.grace_s)


def a_notice_reaches_all(trace: Trace) -> Broken:
    """A notice while the job runs is passed on, unless the processes have it, and all leave."""
    for step in trace.steps:
        event = step.event
        runs = step.before.state in (State.RUNNING, State.REJOINING)
        if not runs or not isinstance(event, Noticed | Stop) or not is_own(step):
            continue
        if step.after.state is not State.PREEMPTING:
            yield f"loses a notice: {step}"
        delivered = isinstance(event, Noticed) and event.delivered
        if not delivered and not actions(step, Notify):
            yield f"keeps a notice to itself: {step}"


def a_withdrawn_notice_ends_nothing(trace: Trace) -> Broken:
    """Where the only notice is withdrawn before anybody has left, the job runs on."""
    for step in trace.steps:
        job = step.before
        event = step.event
        if not isinstance(event, Withdrawn) or job.state is not State.PREEMPTING:
            continue
        ends = job.stopping or job.exit_codes or job.held
        if set(job.notices) != {event.source} or ends:
            continue
        if step.after.state is not State.RUNNING or step.after.wake_at is not None:
            yield f"does not run on: {step}"
        if step.decision.actions != (Unnotify(),):
            yield f"does not say that the notice is withdrawn: {step}"


def leaving_is_not_done(trace: Trace) -> Broken:
    """A job is done where all processes ended with 0, and no notice was there.

    Or where the loop of this very attempt has said that it is done.
    """
    if trace.last.state is not State.FINISHED:
        return
    attempt = list(trace.attempts())[-1]
    said = any(isinstance(step.event, Progressed) and step.event.done for step in attempt)
    said_by_attempt = {getattr(step.event, "attempt", -1) for step in attempt if said}
    noticed = attempt[-1].before.state in GOES
    if any(trace.last.exit_codes.values()):
        yield f"is done, and {trace.last.exit_codes}"
    if noticed and trace.last.attempt not in said_by_attempt:
        yield f"takes a job for done that has left after a notice: {attempt[-1]}"

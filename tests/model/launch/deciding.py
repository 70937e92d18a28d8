"""Sizes, exit codes, reasons, and that decisions are a function."""

from __future__ import annotations

from dataclasses import replace

from holdfast.launch import Preempted
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.job import (
    DO_NOT_RESTART,
    HANG,
    PREEMPTED,
    CoordinatorEnded,
    Decision,
    Exited,
    Job,
    Launch,
    Rejoin,
    Reserved,
    Stalled,
    StartFailed,
    State,
    Stop,
)

from .reading import CLOSE_S, GOES, LEFT, Broken, actions, is_late, is_own
from .trace import Step, Trace

GOING = (State.RUNNING, State.REJOINING, State.SCHEDULING)
"""The states in which an event decides the exit code."""


def sizes_fit(trace: Trace) -> Broken:
    """An attempt has no fewer processes than the least, and no more than there is room for."""
    for step in trace.steps:
        for action in actions(step, Launch):
            job = step.before
            room = step.event.num_processes if isinstance(step.event, Reserved) else 0
            if not job.min_processes <= action.num_processes <= min(room, job.max_processes):
                yield f"launches {action.num_processes}: {step}"
        for action in actions(step, Rejoin):
            job = step.before
            if not job.min_processes <= action.num_processes <= job.max_processes:
                yield f"goes on with {action.num_processes}: {step}"


def growing_waits(trace: Trace) -> Broken:
    """An attempt is made larger no earlier than `grow_after_s`, and where nobody has left."""
    launched_at = 0.0
    for step in trace.steps:
        if actions(step, Launch, Rejoin):
            launched_at = step.now
        grows = step.before.state is State.RUNNING and step.after.grows
        young = step.now < launched_at + step.before.policy.grow_after_s - CLOSE_S
        if grows and (young or step.before.exit_codes):
            yield f"grows too early: {step}"


def earlier_attempts_are_over(trace: Trace) -> Broken:
    """An event of an earlier attempt changes nothing."""
    for step in trace.steps:
        if is_late(step) and (step.decision.job is not step.before or step.decision.actions):
            yield f"minds an earlier attempt: {step}"


def the_exit_code_says_why(trace: Trace) -> Broken:
    """The exit code is that of docs/running-jobs.md: the first process that fails decides."""
    last = trace.last
    expected = {0} if last.state is State.FINISHED else _codes(list(trace.attempts())[-1])
    stopped = any(isinstance(step.event, Stop) for step in trace.steps)
    # Where the end of the attempt was decided before Stop came, both are right.
    if stopped and last.state is State.PREEMPTED and expected != {DO_NOT_RESTART}:
        expected = expected | {PREEMPTED}
    if last.exit_code not in expected:
        yield f"ends with {last.exit_code}, expected one of {expected}: {last.error}"


def _codes(attempt: list[Step]) -> set[int]:
    """Returns the exit codes that are right for a job that failed in this attempt."""
    events = [step.event for step in attempt if is_own(step)]
    if any(isinstance(event, Exited) and event.code == DO_NOT_RESTART for event in events):
        return {DO_NOT_RESTART}
    for step in attempt:
        if step.before.state in GOES and step.after.state not in (*GOES, State.RUNNING):
            return {_code_after_a_notice(step)}
        code = _code(step)
        if code is not None:
            return {code}
    return {1}  # no room


def _code_after_a_notice(step: Step) -> int:
    return 1 if step.before.grows and isinstance(step.event, CoordinatorEnded) else PREEMPTED


def _code(step: Step) -> int | None:
    """Returns the exit code that a step decides while the job runs, None where none."""
    event = step.event
    if not is_own(step) or step.before.state not in GOING:
        return None
    same = step.after.attempt == step.before.attempt
    if isinstance(event, Exited) and same and event.process in step.after.alive:
        return None  # it is started again in this attempt, and the others go on
    if isinstance(event, Exited) and event.code not in LEFT:
        return event.code if event.code >= 0 else 128 - event.code
    if isinstance(event, Exited) and event.code == PREEMPTED and not step.after.alive:
        return PREEMPTED
    if isinstance(event, Stalled) and step.before.step >= 0:
        return HANG
    return 1 if isinstance(event, Stalled | StartFailed | CoordinatorEnded) else None


def a_decision_has_its_reason(trace: Trace) -> Broken:
    """Each decision says why, and a job that failed says with what error."""
    for step in trace.steps:
        if not step.decision.reason:
            yield f"gives no reason: {step}"
    last = trace.last
    if last.state is State.FAILED and (last.error is None or last.exit_code == 0):
        yield f"fails without an error: {trace.steps[-1]}"


def decisions_are_a_function(trace: Trace) -> Broken:
    """The same job, event and time make the same decision, whenever it is asked for."""
    for step in trace.steps:
        again = decide(step.before, step.event, step.now)
        if _plain(again) != _plain(step.decision):
            yield f"decides otherwise the second time, {again}: {step}"


def _plain(decision: Decision) -> tuple[Job, object, object]:
    """Returns a decision whose error is text: an exception equals itself alone."""
    job = decision.job
    error = (type(job.error), str(job.error))
    return replace(job, error=None), error, (decision.actions, decision.reason)


def the_result_says_it(trace: Trace) -> Broken:
    """The result has the job's end in it, and accounts for all time."""
    result = trace.result
    last = trace.last
    expected = "failed"
    if last.state is State.FINISHED:
        expected = "done"
    elif isinstance(last.error, Preempted):
        expected = "preempted"
    if (result.outcome, result.exit_code) != (expected, last.exit_code):
        yield f"says {result.outcome} with {result.exit_code}: {trace.steps[-1]}"
    if abs(result.goodput.total_s - result.elapsed_s) > CLOSE_S:
        yield f"accounts for {result.goodput.total_s} of {result.elapsed_s} s"

"""Nothing waits for ever, and nothing follows the end."""

from __future__ import annotations

import math

from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.job import (
    Launch,
    Rejoin,
    Replace,
    Reserve,
    State,
    Stop,
    Tick,
)

from .reading import CLOSE_S, GOES, Broken, actions
from .trace import Trace

TIMED = (*GOES, State.SCHEDULING, State.RESTARTING, State.REJOINING)


def nothing_waits_for_ever(trace: Trace) -> Broken:
    """Each state that is not final has a process that runs, or a time at which it ends."""
    for step in trace.steps:
        job = step.after
        if job.state in TIMED and job.wake_at is None:
            yield f"waits without a time: {step}"
        if job.state is State.RUNNING and not job.alive:
            yield f"runs without a process: {step}"


def a_time_that_has_come_counts(trace: Trace) -> Broken:
    """A Tick at the time that was wanted, or after it, is not asked for again."""
    for step in trace.steps:
        wanted = step.before.wake_at
        if not isinstance(step.event, Tick) or wanted is None or step.now < wanted:
            continue
        late = step.after.wake_at is not None and step.after.wake_at <= step.now
        if late and step.after.state is step.before.state and not step.decision.actions:
            yield f"wants the time again that has come: {step}"


def nothing_follows_a_stop(trace: Trace) -> Broken:
    """After Stop nothing is started, and the job ends within the times that it has."""
    asked_at = math.inf
    for step in trace.steps:
        policy = step.before.policy
        if isinstance(step.event, Stop) and not step.before.final:
            asked_at = min(asked_at, step.now)
        if asked_at < math.inf and actions(step, Reserve, Launch, Rejoin, Replace):
            yield f"starts after Stop: {step}"
        longest = max(policy.grace_s, policy.commit_grace_s) + policy.grace_s
        longest += policy.preemption_grace_s
        if step.now > asked_at + longest + CLOSE_S:
            yield f"goes on, asked to stop at {asked_at:.2f}: {step}"
            return


def a_final_job_is_left_alone(trace: Trace) -> Broken:
    """Whatever comes after the end changes nothing."""
    last = trace.steps[-1]
    if not last.after.final:
        yield f"does not end: {last}"
        return
    for step in trace.steps:
        decision = decide(last.after, step.event, last.now + 1.0)
        if decision.job != last.after or decision.actions:
            yield f"acts after the end, on {step.event}: {decision.reason}"

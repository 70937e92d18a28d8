"""Budgets, progress and back-offs."""

from __future__ import annotations

import math
from itertools import groupby

from holdfast.launch.supervisor.job import (
    Launch,
    Progressed,
    Release,
    Unplaced,
)

from .reading import CLOSE_S, Broken, actions, is_own
from .trace import Step, Trace


def budgets_hold(trace: Trace) -> Broken:
    """No budget is exceeded."""
    for step in trace.steps:
        for setting, used in step.after.budget_used.items():
            if used > getattr(step.after.policy, setting):
                yield f"uses {setting} {used} times: {step}"


def an_attempt_costs_once(trace: Trace) -> Broken:
    """The end of an attempt takes one from one budget, and it takes it where another follows: none
    where it ends for want of room, since the death before it has been counted, nor where it would
    have been the last, but for a save that was committed after it.
    """
    full = _full(trace)
    for number, steps in groupby(trace.steps, lambda step: step.before.attempt):
        taken = 0
        goes_on = False
        for step in steps:
            goes_on |= bool(step.before.why_final) and not step.after.why_final
            had = 0 if _is_better(step) else sum(step.before.budget_used.values())
            taken += max(0, sum(step.after.budget_used.values()) - had)
        is_free = step.after.final or step.before.resizes or number in full or goes_on
        if number and (taken > (number not in full) or (taken == 0 and not is_free)):
            yield f"takes {taken} from the budgets in attempt {number}"


def only_progress_refills(trace: Trace) -> Broken:
    """A budget is given back by a step beyond all others alone: by a saved one, if any is."""
    step_made = -1
    saved = -1
    for step in trace.steps:
        event = step.event
        better = False
        if isinstance(event, Progressed) and is_own(step):
            better = event.saved_step > saved
            better |= max(saved, event.saved_step) < 0 and event.step > step_made
            saved = max(saved, event.saved_step)
            step_made = max(step_made, event.step)
        if not better and _refills(step):
            yield f"refills a budget: {step}"


def _is_better(step: Step) -> bool:
    """Whether processes tell of progress by the word that ends the attempt."""
    event = step.event
    if not isinstance(event, Progressed) or not step.is_new_attempt:
        return False
    saved = max(event.saved_step, step.before.saved_step)
    return saved > step.before.saved_step or (saved < 0 and event.step > step.before.step)


def _full(trace: Trace) -> set[int]:
    """Returns the attempts that gave way to smaller ones, of the same processes."""
    return {
        step.before.attempt
        for step in trace.steps
        if isinstance(step.event, Unplaced) and step.is_new_attempt
    }


def _refills(step: Step) -> bool:
    used = step.after.budget_used
    return any(used.get(name, 0) < count for name, count in step.before.budget_used.items())


def idle_attempts_end_the_job(trace: Trace) -> Broken:
    """So many attempts in a row without progress, after a first step, are the last ones."""
    idle = 0
    better = {step.before.attempt for step in trace.steps if _is_better(step)}
    full = _full(trace)
    for attempt in trace.attempts():
        last = attempt[-1].after
        ran = bool(last.staying) or any(actions(step, Launch) for step in attempt)
        ran &= last.attempt not in full
        idle = 0 if last.progressed or last.attempt in better else idle + ran
        goes_on = not last.final and not last.resizes
        limit = max(1, last.policy.attempts_without_progress)
        if idle >= limit and last.step >= 0 and ran and goes_on:
            yield f"goes on after {idle} attempts without progress: {attempt[-1]}"


def back_offs_are_bounded(trace: Trace) -> Broken:
    """The back-off doubles with each attempt that was charged, up to its cap, less its jitter."""
    waits_until = -math.inf
    for step in trace.steps:
        job = step.after
        policy = job.policy
        if actions(step, Release) and not job.final and not step.is_new_attempt:
            tries = max(0, sum(job.budget_used.values()) - 1)
            longest = min(policy.backoff_cap_s, policy.backoff_s * 2.0**tries)
            wait_s = (job.wake_at or 0.0) - step.now
            if not longest * (1 - policy.backoff_jitter) - CLOSE_S <= wait_s <= longest + CLOSE_S:
                yield f"waits for {wait_s:.2f} s, {longest:.2f} at most: {step}"
            waits_until = step.now + longest * (1 - policy.backoff_jitter)
        if step.is_new_attempt and step.now < waits_until - CLOSE_S:
            yield f"asks for the next attempt before {waits_until:.2f}: {step}"

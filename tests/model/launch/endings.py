"""An attempt begins once, ends once, and is alone."""

from __future__ import annotations

import math

from holdfast.launch import Fatal
from holdfast.launch.supervisor.job import (
    DO_NOT_RESTART,
    CoordinatorEnded,
    Exited,
    Launch,
    PrepareNext,
    Rejoin,
    Release,
    Reserve,
    State,
)

from .reading import CLOSE_S, Broken, actions, begins_to_end, is_own, is_settled
from .trace import Trace


def no_restart_after_93(trace: Trace) -> Broken:
    """An exit code 93 before the next attempt ends the job as failed, with that code."""
    for step in trace.steps:
        event = step.event
        said = isinstance(event, Exited) and event.code == DO_NOT_RESTART and is_own(step)
        last = trace.last
        if said and (last.attempt, last.exit_code) != (step.before.attempt, DO_NOT_RESTART):
            yield f"goes on after 93, and ends with {last.exit_code}: {step}"
        if said and not (last.state is State.FAILED and isinstance(last.error, Fatal)):
            yield f"ends as {last.state} after 93: {step}"


def an_attempt_begins_once(trace: Trace) -> Broken:
    """Each attempt is asked for once, launched at most once, and has the next number."""
    launched: set[int] = set()
    number = 0
    for step in trace.steps:
        for action in actions(step, Reserve, Rejoin):
            if action.attempt != number + 1:
                yield f"asks for attempt {action.attempt} after {number}: {step}"
            number = action.attempt
        for action in actions(step, Launch):
            if action.attempt != number or action.attempt in launched:
                yield f"launches attempt {action.attempt} again: {step}"
            launched.add(action.attempt)


def an_attempt_ends_once(trace: Trace) -> Broken:
    """What is reserved for an attempt is given back once, and the next prepared once."""
    for attempt in trace.attempts():
        releases = 0
        prepared = 0
        for step in attempt:
            own = len(actions(step, Release))
            releases += own
            prepared += len(actions(step, PrepareNext))
            if own and releases > 1 and not step.after.final:
                yield f"gives the machines back again: {step}"
            if prepared > 1:
                yield f"prepares the next attempt again: {step}"
                return


def nothing_follows_what_was_not_given_back(trace: Trace) -> Broken:
    """Before another attempt is asked for, the machines of the one before are given back."""
    held = False
    for step in trace.steps:
        for action in step.decision.actions:
            if isinstance(action, Reserve) and held:
                yield f"asks for machines before giving any back: {step}"
            if isinstance(action, Reserve | Release):
                held = isinstance(action, Reserve)
    if held:
        yield f"ends with machines that were not given back: {trace.last}"


def attempts_are_alone(trace: Trace) -> Broken:
    """When machines are given back for another attempt, nobody of the last one lives.

    Or SIGKILL has not ended it within `grace_s`: then its attempt is fenced off.
    """
    for step in trace.steps:
        if step.after.final or not actions(step, Release, Launch):
            continue
        for process in step.seen.alive:
            killed_at = step.seen.killed_at.get(process, math.inf)
            if step.now < killed_at + step.before.policy.grace_s - CLOSE_S:
                yield f"goes on while process {process} lives: {step}"


def endings_end(trace: Trace) -> Broken:
    """An attempt is over within the larger grace time, and `grace_s` after SIGKILL.

    Where no save can be committed any more, it is over within `grace_s`, and that.
    """
    for attempt in trace.attempts():
        until = math.inf
        for step in attempt:
            policy = step.before.policy
            ends = step.before.state is State.RESTARTING and step.before.alive
            if ends and step.now > until + CLOSE_S:
                yield f"was still ending processes after {until:.2f}: {step}"
            if begins_to_end(step):
                longest_s = max(policy.grace_s, policy.commit_grace_s)
                until = step.now + longest_s + policy.grace_s
            is_over = is_settled(step.after) or isinstance(step.event, CoordinatorEnded)
            # A save of the attempt before has a coordinator of its own.
            is_over &= not step.after.saving_before & step.after.rejoining
            if is_over and step.after.state is State.RESTARTING:
                until = min(until, step.now + 2 * policy.grace_s)

"""Attempts that processes outlive: who may stay, who is replaced, and by when."""

from __future__ import annotations

from holdfast.launch.supervisor.job import (
    Exited,
    Kill,
    Progressed,
    Rejoin,
    Replace,
    State,
    Unplaced,
)

from .reading import CLOSE_S, Broken, actions, is_own, noticed
from .trace import Trace


def who_stays_can(trace: Trace) -> Broken:
    """Only a living process stays that has said that it can, and has not begun to leave; and none
    that is to leave by a notice.
    """
    said: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    for step in trace.steps:
        event = step.event
        if isinstance(event, Progressed) and is_own(step):
            said |= event.restartable
            left |= event.leaving
        for action in actions(step, Rejoin):
            able = (said | step.before.rejoining) & step.before.alive - left
            if isinstance(event, Unplaced):
                able -= event.processes
            stay = frozenset(map(action.number_before, action.staying))
            if not stay or not stay <= able:
                yield f"has {sorted(stay)} stay, of {sorted(able)}: {step}"
            to_leave = action.staying if step.before.stopping else noticed(step)
            if to_leave & action.staying - action.going:
                yield f"has processes stay that are to leave: {step}"
        if step.is_new_attempt:
            said = frozenset()
            left = frozenset()


def nobody_is_missing(trace: Trace) -> Broken:
    """An attempt that processes outlive has as many as the one before, or as many as there was
    room for: those that do not stay are started anew, at once.
    """
    for step in trace.steps:
        for action in actions(step, Rejoin):
            lost = step.event.processes if isinstance(step.event, Unplaced) else ()
            size = step.before.num_processes - len(lost)
            if action.num_processes not in (size, step.before.resize_to):
                yield f"goes on with {action.num_processes}: {step}"
            everybody = frozenset(range(action.num_processes))
            started = [each.processes for each in actions(step, Replace)]
            if frozenset().union(*started) != everybody - action.staying:
                yield f"starts {started} beside {sorted(action.staying)}: {step}"


def a_change_of_size_keeps_all(trace: Trace) -> Broken:
    """To grow, nobody is started again who has left its loop, and can stay; to shrink, nobody of a
    lower number, where no other notice is there.
    """
    for step in trace.steps:
        job = step.after
        can = job.alive <= (job.held & job.restartable) - job.leaving
        ready = job.state is State.PREEMPTING and job.resize_to and job.alive and can
        if ready and job.grows and not job.dismissed and not job.reported_done:
            yield f"waits, to grow: {step}"
        for action in actions(step, Rejoin):
            fewer = step.before.resize_to and len(step.before.notices) == 1
            stay = frozenset(range(action.num_processes)) & step.before.alive
            if isinstance(step.event, Exited):
                stay -= {step.event.process}
            if fewer and not stay <= action.staying - action.going:
                yield f"starts {sorted(stay - action.staying)} again: {step}"


def who_has_no_number_ends(trace: Trace) -> Broken:
    """Whoever leaves, and is not replaced, gets SIGKILL once nobody is waited for, and before that
    has `rejoin_timeout_s`.
    """
    for step in trace.steps:
        over = step.is_new_attempt or step.after.state is not State.REJOINING
        killed = frozenset[int]().union(*(each.processes or () for each in actions(step, Kill)))
        everybody = any(each.processes is None for each in actions(step, Kill))
        left = step.seen.surplus - killed
        was = step.before.state is State.REJOINING and not step.after.final
        if was and over and left and not everybody:
            yield f"forgets {sorted(left)}: {step}"


def only_who_is_late_is_replaced(trace: Trace) -> Broken:
    """Whoever stays is replaced after `rejoin_timeout_s`, or where it has ended well before."""
    for attempt in trace.attempts():
        for step in attempt:
            for action in actions(step, Replace):
                own = isinstance(step.event, Exited) and {step.event.process} == action.processes
                waited_s = step.now - step.before.started_at
                late = waited_s >= step.before.policy.rejoin_timeout_s - CLOSE_S
                if not own and not (late and action.processes <= step.before.rejoining):
                    yield f"replaces {sorted(action.processes)}: {step}"


def joining_again_ends(trace: Trace) -> Broken:
    """All are back, or replaced, within `rejoin_timeout_s` since the last death, or as long as a
    save needs them.
    """
    for step in trace.steps:
        job = step.after
        until = job.started_at + max(job.policy.rejoin_timeout_s, job.policy.commit_grace_s)
        if job.state is State.REJOINING and step.now > until + CLOSE_S:
            yield f"still waits for {sorted(job.rejoining)} after {until:.2f}: {step}"

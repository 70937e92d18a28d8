"""Whoever is needed, whoever leaves, and whoever has a way of its own: who gets which signal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.launch import Preempted, StartupFailed
from holdfast.launch.supervisor.goodput import LIVES
from holdfast.launch.supervisor.job import (
    Exited,
    Noticed,
    Stalled,
    State,
    Tick,
    Withdrawn,
)

from .reading import CLOSE_S, GOES, Broken, begins_to_end, is_failure, is_settled, told
from .trace import Step, Trace


def the_needed_are_spared(trace: Trace) -> Broken:
    """Whoever is needed by a save that can still be committed is ended by no decision.

    Only after `commit_grace_s`, or at the deadline of a notice.
    """
    until = _Until()
    for step in trace.steps:
        until.take(step)
        hit = (step.killed | step.terminated | step.replaced) & step.seen.needed
        if not step.is_new_attempt and hit and step.now < until.at - CLOSE_S:
            yield f"ends {sorted(hit)}, needed by a save until {until.at:.2f}: {step}"


class _Until:
    """The time before which nobody is ended who is needed, step by step."""

    def __init__(self) -> None:
        self.at = math.inf

    def take(self, step: Step) -> None:
        """Takes what the step says of the time."""
        if step.is_new_attempt and step.before.state is not State.REJOINING:
            self.at = math.inf
        self.at = min([self.at, *_limits(step)])
        if isinstance(step.event, Withdrawn) and step.after.state is State.RUNNING:
            self.at = math.inf


def _limits(step: Step) -> Iterator[float]:
    """Yields the times after which whoever is needed may be ended, too."""
    policy = step.before.policy
    goes = step.before.state in GOES
    if step.is_new_attempt and step.after.state is State.REJOINING:
        yield step.now + policy.commit_grace_s
    if step.after.state in GOES and not goes:
        yield step.now + policy.preemption_grace_s
    if begins_to_end(step) or (goes and is_failure(step)):
        yield step.now + policy.commit_grace_s
    if isinstance(step.event, Noticed) and step.before.state in LIVES:
        yield from told(step.event.deadline)
    # No restart can help: the job ends at once.
    if isinstance(step.after.error, StartupFailed):
        yield -math.inf


def who_has_nothing_to_do_is_ended(trace: Trace) -> Broken:
    """Where no save can be committed any more, all whose client is known get SIGKILL at once.

    Those that leave by themselves get none yet.
    """
    for attempt in trace.attempts():
        killed: frozenset[int] = frozenset()
        for step in attempt:
            job = step.after
            killed |= step.killed
            left = (job.alive & job.saves.keys() & step.seen.alive) - job.leaving - killed
            if is_known_to_be_over(step) and left and job.state is State.RESTARTING:
                yield f"leaves {sorted(left)} alive that have nothing to do: {step}"


def is_known_to_be_over(step: Step) -> bool:
    """Whether the supervisor has been told all by which no save can be committed any more."""
    # With the end of a process, and with a hang, comes all that was reported before.
    is_told = isinstance(step.event, Exited | Stalled) and step.after.alive == step.seen.alive
    # A save of the attempt before has a coordinator of its own, of whose end nobody tells.
    if step.after.saving_before & step.after.rejoining:
        return False
    return is_settled(step.after) or (is_told and not step.seen.needed)


def who_has_no_client_has_time(trace: Trace) -> Broken:
    """Whoever has no client gets SIGKILL no earlier than `grace_s` after SIGTERM.

    The deadline of a notice ends it all the same.
    """
    for attempt in trace.attempts():
        asked: dict[int, float] = {}
        for step in attempt:
            asked |= dict.fromkeys(step.terminated - asked.keys(), step.now)
            if step.before.state is not State.RESTARTING or _is_due(step):
                continue
            has_client = step.after.saves.keys() | step.before.rejoining
            for process in step.killed - has_client - step.before.leaving:
                since = asked.get(process, math.inf)
                if step.now < since + step.before.policy.grace_s - CLOSE_S:
                    yield f"gives process {process} no time since SIGTERM: {step}"


def _is_due(step: Step) -> bool:
    """Whether the deadline of a notice has come, or its time is over."""
    deadlines = (notice.deadline for notice in step.before.notices.values())
    if min(told(*deadlines), default=math.inf) <= step.now:
        return True
    return isinstance(step.before.error, Preempted)


def who_leaves_has_time(trace: Trace) -> Broken:
    """Whoever is in `multihost.shutdown()` has `grace_s` to end with its own exit code.

    The deadline of a notice ends it all the same.
    """
    for attempt in trace.attempts():
        since = math.inf
        for step in attempt:
            if begins_to_end(step):
                since = step.now
            hit = step.killed & step.before.leaving
            early = step.now < since + step.before.policy.grace_s - CLOSE_S
            if hit and early and not _is_over_at_once(step):
                yield f"ends {sorted(hit)}, which leave: {step}"


def _is_over_at_once(step: Step) -> bool:
    """Whether a notice's time is over, or no restart can help."""
    at_deadline = step.before.state in GOES and isinstance(step.event, Tick)
    return at_deadline or _is_due(step) or isinstance(step.after.error, StartupFailed)


def nobody_stays_behind(trace: Trace) -> Broken:
    """Whoever lives when the job has become final has been sent a signal."""
    sent: frozenset[int] = frozenset()
    for step in trace.steps:
        if step.is_new_attempt:
            sent = frozenset()
        sent |= step.killed | step.terminated
        if step.after.final and step.seen.alive - sent and step.after.alive:
            yield f"leaves {sorted(step.seen.alive - sent)} behind: {step}"

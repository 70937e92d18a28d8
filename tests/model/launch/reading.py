"""What the rules read in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from holdfast.launch.supervisor.goodput import LIVES
from holdfast.launch.supervisor.job import (
    PREEMPTED,
    Exited,
    Job,
    Noticed,
    State,
)
from holdfast.multihost.group.group import SaveStage

from .trace import Step

Broken: TypeAlias = Iterator[str]
LEFT = (0, PREEMPTED)
GOES = (State.PREEMPTING,)
CLOSE_S = 1e-6


def is_failure(step: Step) -> bool:
    """Whether a process has ended that did not leave as it was to."""
    event = step.event
    return is_own(step) and isinstance(event, Exited) and event.code not in LEFT


def is_own(step: Step) -> bool:
    """Whether the event is no late one of an attempt before, and the job takes events."""
    return not is_late(step) and not step.before.final


def is_late(step: Step) -> bool:
    """Whether the event is of an attempt before, or the end of a life before."""
    if isinstance(step.event, Exited):
        return step.event.life != step.before.lives.get(step.event.process)
    attempt = getattr(step.event, "attempt", None)
    return attempt not in (None, step.before.attempt)


def actions(step: Step, *kinds: type) -> list[Any]:
    """Returns the actions of these kinds."""
    return [action for action in step.decision.actions if isinstance(action, kinds)]


def noticed(step: Step) -> frozenset[int]:
    """Returns the processes that are to leave, by the notices that stand with the event."""
    event = step.event
    given = frozenset[int]()
    if isinstance(event, Noticed) and is_own(step):
        given = event.processes or frozenset(range(step.before.num_processes))
    return step.before.noticed | given


def told(*times: float | None) -> list[float]:
    """Returns the times that were told, without those that were not."""
    return [at for at in times if at is not None]


def begins_to_end(step: Step) -> bool:
    """Whether what is left of an attempt is being ended from here on."""
    return step.before.state in LIVES and step.after.state is State.RESTARTING


def is_settled(job: Job) -> bool:
    """Whether a process has said how the last save ended."""
    latest = max((each.save for each in job.saves.values()), default=-1)
    return (latest, SaveStage.SETTLED) in job.saves.values()

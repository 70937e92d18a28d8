"""All sequences of events up to a length, of a job of two processes; states that are alike but for
the hour are visited once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.job import (
    NO_SAVE,
    Capacity,
    CoordinatorEnded,
    Event,
    Exited,
    Job,
    Noticed,
    Progressed,
    Reserved,
    SavePosition,
    Stalled,
    Start,
    StartFailed,
    State,
    Stop,
    Tick,
    Unplaced,
    Withdrawn,
)
from holdfast.multihost.group.group import SaveStage
from tests.model.promise import Broken

from .promises import Decide, Step, check_step, check_way_out

POLICY = RestartPolicy(
    max_failures=1,
    max_preemptions=1,
    max_startup_failures=1,
    max_startup_timeouts=1,
    attempts_without_progress=2,
    backoff_jitter=0.0,
    grow_after_s=0.0,
)
CODES = (0, 75, 1, 93, 94)
STEPS = 2  # that a job makes in all
_STAGES = (SaveStage.WRITING, SaveStage.REPORTED, SaveStage.SETTLED)
_TIMES = frozenset({"started_at", "leaving_since", "ending_since", "wake_at"})
_WORDS = frozenset({"why_waiting", "why_final", "error", "job_id", "policy"})


class Found(NamedTuple):
    """How far a search came: the states, the decisions, and the shortest story that breaks one."""

    states: int
    decisions: int
    depth: int
    broken: Broken | None = None
    story: tuple[str, ...] = ()


def search(depth: int, decide: Decide = decide) -> Found:
    """Returns what all sequences of at most `depth` events lead to, after a job has been started;
    ends at the first promise that breaks.
    """
    job = decide(Job("j", 1, 2, POLICY), Start(), 0.0).job
    # A state, its time, and the story that led there: the shortest, since it goes by length.
    front: list[tuple[Job, float, tuple[str, ...]]] = [(job, 0.0, ())]
    seen = {_key(job, 0.0)}
    decisions = 0
    for length in range(depth):
        following = []
        for before, now, story in front:
            for event, at in events_of(before, now):
                decisions += 1
                told = (*story, f"{at:g} s: {event}")
                try:
                    decision = decide(before, event, at)
                    check_step(Step(before, event, at, decision))
                    after = decision.job
                    key = _key(after, at)
                    if key in seen:
                        continue
                    check_way_out(decide, after, at)
                except Broken as broken:
                    return Found(len(seen), decisions, length + 1, broken, told)
                seen.add(key)
                following.append((after, at, told))
        front = following
    return Found(len(seen), decisions, depth)


def events_of(job: Job, now: float) -> Iterator[tuple[Event, float]]:
    """Yields what may happen next, and when: at once, or when the launcher wakes up."""
    attempt = job.attempt
    if job.wake_at is not None:
        yield Tick(), max(now, job.wake_at)
    happenings: list[Event] = [Stop("SIGTERM"), Capacity(1), Capacity(2)]
    if job.state is State.SCHEDULING:
        happenings += [Reserved(attempt, 1), Reserved(attempt, 2)]
        happenings += [StartFailed(attempt, "no"), StartFailed(attempt, "taken", preempted=True)]
    if job.replaced & job.alive and job.num_processes > job.min_processes:
        happenings += [Unplaced(attempt, frozenset({min(job.replaced & job.alive)}), "full")]
    for process in job.alive:
        life = job.lives[process]
        happenings += [Exited(life, process, code) for code in CODES]
        happenings += [Exited(life, process, 1, met=attempt - 1)]
    if job.alive:
        one = frozenset({min(job.alive)})
        happenings += [Noticed("a"), Noticed("b", now + 5, True, one), Withdrawn("a")]
        happenings += [CoordinatorEnded(attempt, "gone")]
        happenings += [Stalled(attempt, "no step", (min(job.alive),))]
        happenings += _reports(job)
    for event in happenings:
        yield event, now


def _reports(job: Job) -> Iterator[Progressed]:
    """Yields what the processes may report: a step, one that is saved, the end, and each how far it
    is in its save, that it leaves, that it can outlive the attempt, or has left its loop.
    """
    attempt = job.attempt
    if job.step < STEPS:
        yield Progressed(attempt, job.step + 1, job.saved_step)
        yield Progressed(attempt, job.step + 1, job.step + 1)
    if not job.reported_done:
        yield Progressed(attempt, job.step, job.saved_step, done=True)
    everybody = frozenset(job.alive)
    if not everybody <= job.restartable:
        yield Progressed(attempt, job.step, job.saved_step, restartable=everybody)
    if not everybody <= job.held and everybody <= job.restartable:
        yield Progressed(attempt, job.step, job.saved_step, held=everybody)
    for process in job.alive:
        if process not in job.leaving:
            yield Progressed(attempt, job.step, job.saved_step, leaving=frozenset({process}))
        known = job.saves.get(process, NO_SAVE)
        later = [stage for stage in _STAGES if known < (0, stage)]
        if later:
            position = SavePosition(0, later[0])
            yield Progressed(
                attempt, job.step, job.saved_step, saves={**job.saves, process: position}
            )


def _key(job: Job, now: float) -> tuple[object, ...]:
    """Returns what tells a state from others: times are as long ago, or ahead, as they are."""
    parts: list[object] = []
    for each in fields(job):
        value = getattr(job, each.name)
        if each.name in _WORDS:
            parts.append(type(value) if each.name == "error" else bool(value))
        elif each.name in _TIMES:
            parts.append(None if value is None else round(value - now, 3))
        elif each.name == "notices":
            parts.append(
                frozenset(
                    (s, it.processes, None if it.deadline is None else it.deadline - now)
                    for s, it in value.items()
                )
            )
        elif isinstance(value, set):
            parts.append(frozenset(value))
        elif isinstance(value, dict):
            parts.append(frozenset(value.items()))
        else:
            parts.append(value)
    return tuple(parts)

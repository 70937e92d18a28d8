"""Whether a job has come to a stand by its launcher's own measure: rules over the steps that its
processes report. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.proto import coordination_pb2, session_pb2

from .findings import Evidence, at, expected_s, place_of, who


@dataclass(frozen=True)
class StallRule:
    """How long a job may be without a step, and by how many one process may be behind the median
    before that is reported.
    """

    timeout_s: float
    first_step_s: float  # from the start of an attempt to its first step
    straggler_steps: float
    waited_s: float = 0.0  # of a coordinator that was there before its attempt


def find_stall(status: session_pb2.StatusResponse, rule: StallRule) -> str:
    """Returns why the job is taken for hanging, "" while it gets on.

    It hangs when no process that has reported steps makes one any more, or when one does not that
    is behind the median of all: one that is ahead waits for the others. A process that leaves, has
    left, or reported that it is done, is not waited for. Steps are known as often as processes
    report, so no timeout below two reports counts.
    """
    if all(task.step_age_s < 0 for task in status.tasks):
        # One that is not there may come yet.
        have_left = status.phase != "gathering" and all(
            task.state == coordination_pb2.DISCONNECTED for task in status.tasks
        )
        if have_left or status.up_s - rule.waited_s <= rule.first_step_s:
            return ""
        return f"no process has reported a step within {rule.first_step_s:g} s of its start"
    running = _running(status)
    still = [
        task
        for task in running
        if task.step_age_s > max(rule.timeout_s, 2 * expected_s(status, task))
    ]
    if not still:
        return ""
    for_s = min(task.step_age_s for task in still)
    if len(still) == len(running):
        return (
            f"no process has made a step for {for_s:.0f} s, since step"
            f" {max(task.progress.step for task in running)}"
        )
    middle = median(task.progress.step for task in running)
    behind = [task for task in still if task.progress.step < middle]
    return f"{_behind(behind, middle)}, and no step further for {for_s:.0f} s" if behind else ""


def find_stragglers(
    status: session_pb2.StatusResponse, rule: StallRule
) -> list[session_pb2.TaskStatus]:
    """Returns the processes that are more than so many steps behind the median of all."""
    running = _running(status)
    middle = median([task.progress.step for task in running] or [0])
    return [task for task in running if middle - task.progress.step > rule.straggler_steps]


def describe_stragglers(evidence: Evidence, stragglers: Sequence[session_pb2.TaskStatus]) -> str:
    """Returns who is behind, by how much, and where the first of them is."""
    middle = median(task.progress.step for task in _running(evidence.status))
    return _behind(stragglers, middle) + at(place_of(evidence, stragglers))


def _running(status: session_pb2.StatusResponse) -> list[session_pb2.TaskStatus]:
    """Returns the processes that have reported steps and are to make more."""
    return [
        task
        for task in status.tasks
        if task.step_age_s >= 0
        and task.state == coordination_pb2.CONNECTED
        and not task.progress.values.get("done", 0.0)
        and not task.progress.values.get("leaving", 0.0)
    ]


def _behind(tasks: Sequence[session_pb2.TaskStatus], middle: float) -> str:
    step = min(task.progress.step for task in tasks)
    return (
        f"{who(tasks)} {'is' if len(tasks) == 1 else 'are'} at step {step}, {middle - step:.0f}"
        " behind the median"
    )

"""The processes of a job as the page shows them: how each is, and a large job in ranges. Pure.

A job of at most `MOST_ROWS` processes is shown process by process. Of a larger one the page gets at
most `MOST_ODD` processes, those that are not as most are, and at most `MOST_RANGES` ranges with
their counts. A range's own processes come when somebody opens it. So a snapshot of 16,384 processes
is no larger than one of 1,024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.coordination.diagnosis.findings import BARRIER_S, Finding, silent
from holdfast.coordination.diagnosis.verdict import OVER, JobState
from holdfast.proto import coordination_pb2, session_pb2

MOST_ROWS = 1024
MOST_ODD = 16
MOST_RANGES = 256
_MOST_SLICES = 64  # of more, a range may hold several
_WORST_FIRST = ("culprit", "behind", "absent", "left", "waiting", "ok")
_NO_CULPRITS = frozenset({"together", "gathering"})  # findings that blame nobody
_BEHIND_STEPS = 1


def kinds_of(
    status: session_pb2.StatusResponse, findings: Sequence[Finding], state: JobState
) -> list[str]:
    """Returns how each process is, in one of the words of `_WORST_FIRST`."""
    named = {
        process
        for finding in findings
        if finding.kind not in _NO_CULPRITS
        for process in finding.processes
    }
    at_barriers = {
        each.task_id
        for barrier in status.barriers
        for each in barrier.waiting
        if each.since_s > BARRIER_S  # a step may have many short barriers
    }
    furthest = max((task.progress.step for task in status.tasks), default=0)

    def kind(task: session_pb2.TaskStatus) -> str:
        if task.state == coordination_pb2.ERROR or silent(status, task):
            return "culprit"
        if task.state == coordination_pb2.DISCONNECTED:
            return "left"
        if task.state != coordination_pb2.CONNECTED:
            return "absent"
        if task.task_id in named:
            return "culprit"
        if state in OVER:
            return "left"
        if task.task_id in at_barriers or state is JobState.HUNG:
            return "waiting"
        has_step = task.progress.HasField("step")
        if has_step and furthest - task.progress.step > _BEHIND_STEPS:
            return "behind"
        return "ok"

    return [kind(task) for task in status.tasks]


def odd_ones(kinds: Sequence[str]) -> list[int]:
    """Returns the indices of the first processes that are not as most are, the worst first."""
    counts = Counter(kinds)
    usual = counts.most_common(1)[0][0]
    odd = [number for number, kind in enumerate(kinds) if kind != usual or kind == "culprit"]
    odd.sort(key=lambda number: _WORST_FIRST.index(kinds[number]))
    return odd[:MOST_ODD]


@dataclass(frozen=True)
class ProcessRange:
    """Neighbours, by their index: of one slice, and of whole hosts where these are small enough."""

    begin: int
    end: int
    slice_id: int | None


def slices_of(status: session_pb2.StatusResponse) -> int:
    """Returns how many slices the processes have reported; 1 where they reported none."""
    return max((int(task.progress.values.get("num_slices", 1)) for task in status.tasks), default=1)


def slice_of(index: int, count: int, num_slices: int) -> int | None:
    """Returns the slice of a process: slices are equal, and their ranks are contiguous."""
    return index * num_slices // count if num_slices > 1 else None


def ranges_of(status: session_pb2.StatusResponse) -> list[ProcessRange]:
    """Returns the processes in at most `MOST_RANGES` ranges, none over the border of a slice."""
    ranges = []
    tasks = status.tasks
    count = len(tasks)
    num_slices = slices_of(status)
    if num_slices > _MOST_SLICES:
        num_slices = 1
    wanted = -(-count // (MOST_RANGES // 2))
    begin = 0
    for end in range(1, count + 1):
        length = end - begin
        its_slice = slice_of(begin, count, num_slices)
        if end < count and slice_of(end, count, num_slices) == its_slice:
            other_host = tasks[end].host != tasks[end - 1].host
            # Only a host of many processes is cut.
            if length < wanted or not (other_host or length >= 2 * wanted):
                continue
        ranges.append(ProcessRange(begin, end, its_slice))
        begin = end
    return ranges


def range_facts(
    status: session_pb2.StatusResponse, kinds: Sequence[str], its: ProcessRange
) -> dict[str, Any]:
    """Returns what the page says of a range that is not opened."""
    tasks = status.tasks[its.begin : its.end]
    counts = Counter(kinds[its.begin : its.end])
    steps = [task.progress.step for task in tasks if task.progress.HasField("step")]
    usual = counts.most_common(1)[0][0]
    worst = next(kind for kind in (*_WORST_FIRST[:3], usual) if counts[kind])
    return {
        "first": tasks[0].task_id,
        "last": tasks[-1].task_id,
        "slice": its.slice_id,
        "hosts": list(dict.fromkeys((tasks[0].host, tasks[-1].host))),
        "is": worst,
        "kinds": dict(counts),
        "steps": [min(steps), max(steps)] if steps else [],
    }

"""Reports where a job's steps are, and which, for those who watch the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.coordination.names import on_the_wire

from .index import StepIndex, StepInfo

MOST_STEPS = 20  # in one report, the newest


class HostCopies(NamedTuple):
    """Where a local step is: how many hosts may be lost before it is, and by process the ranks, one
    of each host, that have its part.
    """

    survives: int
    holders: Sequence[Sequence[int]]


def root_report(path: str, index: StepIndex, local: Mapping[int, HostCopies]) -> dict[str, Any]:
    """Returns the fields of CheckpointRoot (proto/session.proto): what an index knows of the root,
    and the steps that the hosts have.
    """
    steps = index.known()
    left_behind = index.left_behind()
    damaged = index.passed_over()
    best = index.best_by_metric()
    # What was left behind may have higher numbers, and is not the newest.
    line = sorted({*(step for step in steps if step not in left_behind), *local})
    shown = sorted([*sorted(left_behind & {*steps} - {*line}), *line][-MOST_STEPS:])
    described: list[dict[str, Any]] = []
    for step in shown:
        # What was left behind gives way to a local step of its number.
        is_local = step not in steps or (step in left_behind and step in local)
        copies = local[step] if is_local else HostCopies(0, ())
        fields = steps.get(step, StepInfo()).as_fields() | {
            "step": step,
            "local": is_local,
            "damaged": step in damaged,
            "survives": copies.survives,
            "copies": [{"processes": ranks} for ranks in copies.holders],
            "best": [metric for metric, each in best.items() if each == step],
        }
        if step in left_behind and not is_local:
            fields["left_behind"] = True
        described.append(fields)
    return {"path": on_the_wire(path), "num_steps": len(steps), "steps": described}

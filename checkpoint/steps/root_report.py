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

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields of CheckpointStep."""
        copies = [{"processes": ranks} for ranks in self.holders]
        return {"survives": self.survives, "copies": copies}


def root_report(path: str, index: StepIndex, local: Mapping[int, HostCopies]) -> dict[str, Any]:
    """Returns the fields of CheckpointRoot (proto/session.proto): what an index knows of the root,
    and the steps that the hosts have.
    """
    steps = index.known()
    left_behind = index.left_behind()
    best = index.best_by_metric().items()
    # What was left behind may have higher numbers, and is not the newest.
    line = sorted(steps.keys() - left_behind | local.keys())
    shown = [*sorted(left_behind & {*steps} - {*line}), *line][-MOST_STEPS:]
    described: list[dict[str, Any]] = []
    for step in sorted(shown):
        # What was left behind gives way to a local step of its number.
        is_local = step not in steps or (step in left_behind and step in local)
        copies = local[step] if is_local else HostCopies(0, ())
        fields = {
            **steps.get(step, StepInfo()).as_fields(),
            **copies.as_fields(),
            "step": step,
            "local": is_local,
            "damaged": step in index.passed_over(),
            "best": [metric for metric, each in best if each == step],
        }
        if step in left_behind and not is_local:
            fields["left_behind"] = True
        described.append(fields)
    return {"path": on_the_wire(path), "num_steps": len(steps), "steps": described}

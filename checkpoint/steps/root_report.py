"""Reports where a job's steps are, and which, for those who watch the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.coordination.names import on_the_wire
from holdfast.multihost import Group

from .index import SavedStep, StepIndex

MOST_STEPS = 20  # in one report, the newest


class HostCopies(NamedTuple):
    """Where a local step is: how many hosts may be lost before it is, and by process the ranks, one
    of each host, that have its part.
    """

    survives: int
    holders: Sequence[Sequence[int]]


class RootReporter:
    """Reports for the primary, through its group, what its index knows of the root, with the sizes
    of the steps that it saved itself.

    `local_steps` returns the steps that the hosts have. Thread-safe; never raises.
    """

    def __init__(
        self,
        group: Group,
        path: str,
        index: StepIndex,
        local_steps: Callable[[], Mapping[int, HostCopies]],
    ) -> None:
        self._group = group
        self._path = path
        self._index = index
        self._local_steps = local_steps
        self._lock = threading.Lock()
        self._saved: dict[int, SavedStep] = {}

    def saved(self, step: int, saved: SavedStep) -> None:
        """Notes what is known of a step that is saved, and reports."""
        with self._lock:
            self._saved[step] = saved
        self.report()

    def report(self) -> None:
        """Reports how the root stands now."""
        steps = set(self._index.steps())
        with self._lock:
            self._saved = {step: known for step, known in self._saved.items() if step in steps}
            saved = dict(self._saved)
        damaged = {step for step in steps if self._index.was_passed_over(step)}
        local = self._local_steps()
        # What this run measured itself says more than a record.
        known = self._index.stored() | saved
        best = self._index.best_by_metric()
        left = self._index.left_behind()
        root = root_report(self._path, steps, local, damaged, known, left_behind=left, best=best)
        self._group.report(root=root)


class NoReporter:
    """Stands for the reporter on a process that reports nothing of the root."""

    def saved(self, step: int, saved: SavedStep) -> None:
        """Takes no note."""

    def report(self) -> None:
        """Reports nothing."""


def root_report(
    path: str,
    steps: Set[int],
    local: Mapping[int, HostCopies],
    damaged: Collection[int],
    saved: Mapping[int, SavedStep],
    *,
    left_behind: Collection[int] = (),
    best: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the fields of CheckpointRoot (proto/session.proto): `steps` are in the root,
    `left_behind` those that were, `saved` has those of which more is known, `best` the best step by
    each metric that the keep policy judges by.
    """
    # What was left behind may have higher numbers, and is not the newest.
    line = sorted({*(step for step in steps if step not in left_behind), *local})
    shown = sorted([*sorted({*left_behind} & {*steps} - {*line}), *line][-MOST_STEPS:])
    described: list[dict[str, Any]] = []
    for step in shown:
        known = saved.get(step, SavedStep()).as_fields()
        # What was left behind gives way to a local step of its number.
        is_local = step not in steps or (step in left_behind and step in local)
        flags = {"local": is_local, "damaged": step in damaged}
        if step in left_behind and not is_local:
            flags["left_behind"] = True
        copies = local[step] if is_local else HostCopies(0, ())
        where = {
            "survives": copies.survives,
            "copies": [{"processes": ranks} for ranks in copies.holders],
        }
        marks = {"best": [metric for metric, each in best.items() if each == step]}
        described.append({"step": step, **known, **flags, **where, **marks})
    return {"path": on_the_wire(path), "num_steps": len(steps), "steps": described}

"""What the primary says of its root: sizes, what is local, incremental or damaged; and what of it
reaches the coordinator.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import CheckpointManager, KeepAll, KeepLast, Options
from holdfast.checkpoint.options import Statistics
from holdfast.checkpoint.steps.background import BackgroundWorker
from holdfast.checkpoint.steps.index import StepIndex
from holdfast.checkpoint.steps.root_report import (
    MOST_STEPS,
    HostCopies,
    RootReporter,
    SavedStep,
    root_report,
)
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Solo


class Reported(Solo):
    """The group of one process, which keeps the last root that was reported."""

    root: dict[str, Any]

    def report(self, **progress: Any) -> None:
        self.root = progress.get("root", getattr(self, "root", {}))


def test_the_newest_steps_are_described() -> None:
    """In the root or on the hosts alone, with the sizes that are known."""
    copies = HostCopies(1, [[0, 1], [1, 0]])
    loss = {"loss": 0.5, "nan": math.nan}
    saved = {10: SavedStep(640, True, 1e9, 2.5, loss)}
    found = root_report("/data/run7", {5, 10}, {10: copies, 12: copies}, {5}, saved)
    ten = {"step": 10, "bytes": 640, "incremental": True}
    ten |= {"saved_unix_s": 1e9, "took_s": 2.5, "metrics": {"loss": 0.5}}
    unknown = SavedStep().as_fields()
    twelve = {"step": 12, **unknown}
    durable = {"local": False, "survives": 0, "copies": []}
    assert (found["path"], found["num_steps"]) == ("/data/run7", 2)
    assert found["steps"] == [
        {"step": 5, **unknown, "damaged": True} | durable,
        ten | {"damaged": False} | durable,
        twelve
        | {
            "local": True,
            "damaged": False,
            "survives": 1,
            "copies": [{"processes": [0, 1]}, {"processes": [1, 0]}],
        },
    ]
    many = root_report("/data/run7", set(range(1000)), {}, (), {})
    assert many["num_steps"] == 1000 and [each["step"] for each in many["steps"]] == list(
        range(1000 - MOST_STEPS, 1000)
    )


class Compared(int):
    """A step that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_report_looks_at_each_step_once(tmp_path: Path) -> None:
    """However many steps there are: it is made after every save."""
    steps = [Compared(step) for step in range(300)]
    index = StepIndex(
        LocalStorage(tmp_path), KeepAll(), steps, BackgroundWorker(), Statistics(), deletes=False
    )
    group = Reported()
    reporter = RootReporter(group, "root", index, dict)
    for step in steps:
        reporter.saved(step, SavedStep(1))
    Compared.comparisons = 0
    reporter.report()
    assert Compared.comparisons <= len(steps)
    assert group.root["num_steps"] == len(steps)


def test_a_manager_reports_its_root_as_it_changes(tmp_path: Path) -> None:
    """When it opens, after each save, and when a restore passes over a damaged step; what the keep
    policy deletes is gone from it.
    """
    state = {"w": np.arange(1000.0), "b": np.ones(8)}
    group = Reported()
    with CheckpointManager(
        tmp_path, keep_policy=KeepLast(2), group=group, options=Options(incremental=True)
    ) as manager:
        assert group.root == {"path": str(tmp_path), "num_steps": 0, "steps": []}
        for step in (1, 2, 3):
            manager.save(step, state | {"b": np.full(8, float(step))})
            manager.wait_until_finished()
        steps = {each["step"]: each for each in group.root["steps"]}
        assert list(steps) == [2, 3] and group.root["num_steps"] == 2
        assert steps[3]["bytes"] == 8064 and steps[3]["incremental"] and not steps[3]["damaged"]
        for pack in (tmp_path / "3").rglob("*.safetensors"):
            pack.unlink()
        manager.restore(fallback=True)
        assert [each["step"] for each in group.root["steps"] if each["damaged"]] == [3]
        manager.delete(2)
        assert [each["step"] for each in group.root["steps"]] == [3]
    with CheckpointManager(tmp_path, group=group) as manager:
        (three,) = group.root["steps"]
        assert (three["step"], three["bytes"], three["incremental"], three["damaged"]) == (
            3,
            0,
            False,
            False,
        )

"""What the primary says of its root: sizes, what is local, incremental or damaged; and what of it
reaches the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import (
    CheckpointManager,
    KeepAll,
    KeepAnyOf,
    KeepBest,
    KeepLast,
    Options,
    StepFacts,
)
from holdfast.checkpoint.steps.index import StepIndex, StepInfo
from holdfast.checkpoint.steps.root_report import (
    MOST_STEPS,
    HostCopies,
    root_report,
)
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Solo


class Reported(Solo):
    """The group of one process, which keeps the last root that was reported."""

    root: dict[str, Any]

    def report(self, **progress: Any) -> None:
        self.root = progress.get("root", getattr(self, "root", {}))


def index_of(folder: Path, steps: Mapping[int, StepInfo], **more: Any) -> StepIndex:
    """Returns an index that knows so much of steps."""
    index = StepIndex(LocalStorage(folder), KeepAll(), steps, **more)
    for step, info in steps.items():
        if info.facts is not None:
            index.add(step, info)
    return index


def test_the_newest_steps_are_described(tmp_path: Path) -> None:
    """In the root or on the hosts alone, with the sizes that are known."""
    copies = HostCopies(1, [[0, 1], [1, 0]])
    loss = {"loss": 0.5, "nan": math.nan}
    saved = {5: StepInfo(), 10: StepInfo(StepFacts(10, loss), 640, True, 1e9, 2.5)}
    index = index_of(tmp_path, saved)
    index.pass_over(5)
    found = root_report("/data/run7", index, {10: copies, 12: copies})
    ten = {"step": 10, "bytes": 640, "incremental": True}
    ten |= {"saved_unix_s": 1e9, "took_s": 2.5, "metrics": {"loss": 0.5}}
    unknown = StepInfo().as_fields()
    twelve = {"step": 12, **unknown}
    durable = {"local": False, "survives": 0, "copies": [], "best": []}
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
            "best": [],
        },
    ]
    index = index_of(tmp_path, dict.fromkeys(range(1000), StepInfo()))
    many = root_report("/data/run7", index, {})
    assert many["num_steps"] == 1000 and [each["step"] for each in many["steps"]] == list(
        range(1000 - MOST_STEPS, 1000)
    )


def test_what_was_left_behind_is_said_and_is_not_the_newest(tmp_path: Path) -> None:
    """However many such steps are above the branch. On the hosts a number of theirs may live."""
    copies = HostCopies(1, [[0]])
    steps = dict.fromkeys([*range(5), *range(100, 200)], StepInfo())
    index = index_of(tmp_path, steps, left_behind=range(100, 200))
    found = root_report("/data", index, {150: copies})
    shown = found["steps"]
    assert [each["step"] for each in shown][:5] == list(range(5))
    assert len(shown) == MOST_STEPS
    told = {each["step"]: (each["local"], each.get("left_behind", False)) for each in shown}
    assert told[4] == (False, False)
    assert told[150] == (True, False)
    assert told[199] == (False, True)


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
    index = StepIndex(LocalStorage(tmp_path), KeepAll(), steps)
    for step in steps:
        index.add(step, StepInfo(nbytes=1))
    Compared.comparisons = 0
    found = root_report("root", index, {})
    assert Compared.comparisons <= len(steps)
    assert found["num_steps"] == len(steps)


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


def test_steps_of_an_earlier_run_have_time_and_size_and_the_best_is_marked(tmp_path: Path) -> None:
    """Once the keep policy has read their records: nothing more is read for that."""
    policy = KeepAnyOf(KeepBest(1, "loss"), KeepBest(1, "accuracy", mode="max"), KeepLast(9))
    state = {"w": np.arange(1000.0)}
    with CheckpointManager(tmp_path, keep_policy=policy) as manager:
        for step, loss in ((1, 0.5), (2, 0.9)):
            manager.save(step, state, metrics={"loss": loss, "accuracy": 0.7}).wait()
    group = Reported()
    with CheckpointManager(tmp_path, keep_policy=policy, group=group) as manager:
        assert [each["bytes"] for each in group.root["steps"]] == [0, 0]
        manager.save(3, state, metrics={"loss": 0.6, "accuracy": 0.8}).wait()
        manager.wait_until_finished()
        steps = {each["step"]: each for each in group.root["steps"]}
    assert [steps[step]["bytes"] for step in (1, 2, 3)] == [8000, 8000, 8000]
    assert steps[1]["saved_unix_s"] <= steps[2]["saved_unix_s"] <= steps[3]["saved_unix_s"]
    assert steps[1]["saved_unix_s"] > 0
    assert 0 < steps[1]["took_s"] < 60
    assert steps[1]["metrics"] == {"loss": 0.5, "accuracy": 0.7}
    assert {step: each["best"] for step, each in steps.items()} == {
        1: ["loss"],
        2: [],
        3: ["accuracy"],
    }

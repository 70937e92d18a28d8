"""The lanes of a manager: which one a step goes by, and what each is told of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local, Options
from holdfast.checkpoint.lanes import DurableLane, Lane, LocalLane
from holdfast.checkpoint.saving.async_saver import SaveHandle
from holdfast.checkpoint.saving.stager import SaveOrder
from tests.support.checkpointing import at_once, groups
from tests.support.told_stores import told_url

STATE = {"w": np.arange(100.0)}


class Recorder:
    """Notes what a lane is asked, and asks the lane."""

    def __init__(self, name: str, lane: Lane, asked: list[str]) -> None:
        self._name = name
        self._lane = lane
        self._asked = asked

    def wants(self, step: int) -> bool:
        self._asked.append(f"{self._name} wants {step}")
        return self._lane.wants(step)

    def started(self, step: int) -> None:
        self._asked.append(f"{self._name} started {step}")
        self._lane.started(step)

    def save(self, order: SaveOrder) -> SaveHandle:
        self._asked.append(f"{self._name} save {order.step}")
        return self._lane.save(order)

    def raise_error(self, *, missed: bool = False) -> None:
        self._lane.raise_error(missed=missed)

    def join(self, timeout_s: float | None = None) -> None:
        self._lane.join(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._lane.close(timeout_s)


def record(manager: CheckpointManager) -> list[str]:
    """Returns the list that what the manager asks its lanes goes to from now on."""
    asked: list[str] = []
    names = ("durable", "local")
    recorders = [
        Recorder(name, lane, asked) for name, lane in zip(names, manager._parts.lanes, strict=False)
    ]
    object.__setattr__(manager._parts, "lanes", tuple(recorders))
    return asked


def with_local(folder: Path, **options: Any) -> CheckpointManager:
    local = Local(folder / "host", save_policy=EveryNSteps(2), replicas=0)
    return CheckpointManager(
        folder / "root", save_policy=EveryNSteps(6), local=local, options=Options(**options)
    )


def test_the_durable_lane_is_asked_first(tmp_path: Path) -> None:
    """The local lane is asked where the durable one declines, and told where the other saves."""
    with with_local(tmp_path) as manager:
        first, second = manager._parts.lanes
        assert isinstance(first, DurableLane) and isinstance(second, LocalLane)
        asked = record(manager)
        for step in (5, 4, 6):
            manager.save(step, STATE)
            manager.wait_until_finished()
        assert asked == [
            *("durable wants 5", "local wants 5"),
            *("durable wants 4", "local wants 4", "local save 4"),
            *("durable wants 6", "local started 6", "durable save 6"),
        ]
        assert (manager.local_steps(), manager.all_steps()) == ([4], [4, 6])


def test_a_forced_save_asks_no_lane(tmp_path: Path) -> None:
    """It is durable; `should_save` asks as `save` does."""
    with with_local(tmp_path) as manager:
        asked = record(manager)
        assert manager.should_save(2)
        assert manager.save(2, STATE, force=True)
        manager.wait_until_finished()
        assert asked == ["durable wants 2", "local wants 2", "local started 2", "durable save 2"]


def test_the_local_lane_leaves_durable_steps_alone(tmp_path: Path) -> None:
    """The local lane wants no step that the store has."""
    with with_local(tmp_path) as manager:
        manager.save(2, STATE, force=True)
        manager.wait_until_finished()
        assert not manager.should_save(2) and not manager.save(2, STATE)


def test_a_manager_without_hosts_has_one_lane(tmp_path: Path) -> None:
    """Without a tier there is nothing to ask besides, and no save in flight."""
    with CheckpointManager(tmp_path) as manager:
        assert len(manager._parts.lanes) == 1
        manager.save(1, STATE)
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress() and manager.local_steps() == []


def test_what_is_no_step_fails_on_all(tmp_path: Path) -> None:
    """Without a policy the save is begun: the other process hears why this one cannot."""

    def save(manager: CheckpointManager, step: Any) -> str:
        with manager:
            with pytest.raises(Exception) as caught:
                manager.save(step, STATE).wait()
            manager.save(2, STATE).wait()
            return str(caught.value)

    with groups(2) as both:
        managers = at_once(
            [lambda group=group: CheckpointManager(tmp_path, group=group) for group in both]
        )
        mine, theirs = at_once([lambda: save(managers[0], 1), lambda: save(managers[1], "one")])
    assert "process 1" in mine and "expected a whole number, found a str" in mine
    assert theirs == "step 'one': expected a whole number, found a str"


def test_a_save_that_waited_has_all_of_its_time(tmp_path: Path) -> None:
    """Its time begins when the save before has ended, and not with the call that waits for that."""
    ended_s: list[float] = []
    ends_s: list[float] = []

    def before(verb: str, name: str, end_s: float) -> None:
        if (verb, name) == ("commit", "1/checkpoint.json"):
            while manager._durable._counter < 2:
                time.sleep(0.01)
            ended_s.append(time.monotonic())
        elif verb == "write" and name.startswith("2/"):
            ends_s.append(end_s)

    options = Options(save_timeout_s=60)
    with CheckpointManager(told_url(tmp_path, before), options=options) as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
    assert min(ends_s) >= ended_s[0] + 60

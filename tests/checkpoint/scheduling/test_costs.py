"""What saves cost and how often the job fails, as a policy hears it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Local, PolicyContext, SaveCosts, SaveForGoodput
from holdfast.checkpoint.scheduling import costs as costs_module
from holdfast.checkpoint.scheduling import scheduler as scheduler_module
from holdfast.checkpoint.scheduling.costs import CostMeter
from holdfast.multihost.group.history import JobHistory

STATE = {"w": np.arange(100.0)}


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_usual_save_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took long, since it compiled, says nothing of the others. Nothing is said before a
    save has ended.
    """
    clock = Clock()
    monkeypatch.setattr(costs_module, "time", clock)
    meter = CostMeter()
    clock.now += 50
    meter.note_blocked(90.0)
    assert meter.costs == SaveCosts(run_s=50.0)
    for blocked_s in (1.0, 2.0, 1.5, 1.0):
        meter.note_saved(blocked_s * 10)
        meter.note_blocked(blocked_s)
    assert meter.costs == SaveCosts(1.5, 12.5, 0, 50.0)


def test_the_job_is_asked_for_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's account counts from before this process; a coordinator that does not answer
    changes nothing.
    """
    clock = Clock()
    answers = iter([None, JobHistory(3, 7000.0), None])
    monkeypatch.setattr(costs_module, "time", clock)
    monkeypatch.setattr(costs_module, "job_history", lambda: next(answers))
    meter = CostMeter()
    found = []
    for _ in range(4):
        meter.note_saved(1.0)
        meter.note_saved(1.0)
        found.append((meter.costs.failures, meter.costs.run_s))
        clock.now += 61
        if len(found) == 3:
            break
    assert found == [(0, 0.0), (3, 7000.0), (3, 7061.0)]


@pytest.mark.parametrize("is_local", [False, True])
def test_a_manager_measures_and_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_local: bool,
) -> None:
    """The first save comes after a minute, in each lane; from then on the policy knows what saves
    cost, and the log says why each comes.
    """
    caplog.set_level(logging.INFO, "holdfast")
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "time", clock)
    seen: list[SaveCosts] = []

    class Seeing(SaveForGoodput):
        def wants(self, context: PolicyContext) -> str:
            seen.append(context.costs)
            return super().wants(context)

    class Never:
        def wants(self, context: PolicyContext) -> str:
            return ""

    local = Local(tmp_path / "host", save_policy=Seeing(), replicas=0) if is_local else None
    policy = Never() if is_local else Seeing()
    with CheckpointManager(tmp_path / "root", save_policy=policy, local=local) as manager:
        assert not manager.save(1, STATE)
        clock.now += 61
        assert manager.save(2, STATE)
        manager.wait_until_finished()
        assert not manager.save(3, STATE)
        clock.now += 60
        assert manager.save(4, STATE)
        manager.wait_until_finished()
    assert [costs.blocked_s is None for costs in seen] == [True, True, False, False]
    assert 0 < seen[2].save_s < 60 and 0 < (seen[2].blocked_s or 0) < 60
    said = [text for text in caplog.messages if "is saved" in text]
    assert said[0].startswith("step 2 is saved: 61.0 s since the last save, of 60.0 s: no save")
    assert "step 4 is saved: 60.0 s since" in said[1] and "and the job fails every" in said[1]

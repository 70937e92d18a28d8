"""Unix time that does not jump."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager
from holdfast.checkpoint.storage.steady_time import SteadyClock

DAY_S = 86_400


def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as time does, whatever the clock of the host says meanwhile."""
    clock = SteadyClock()
    before_s = clock.now_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before_s <= clock.now_s() < before_s + 60


def test_a_manager_has_the_time_of_its_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was a day behind when the process began, as on a machine that was resumed from a
    snapshot: the steps of a manager that opens later have the right time.
    """
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + DAY_S)
    before_s = time.time()
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, {"x": np.ones(4)}).wait()
        started_s = manager.structure(0).started_s
    assert started_s is not None and before_s <= started_s <= time.time()


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="of Linux")
def test_time_goes_on_while_a_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that counts sleep is asked: no other tells a pause of the machine."""
    clock = SteadyClock()
    boot = time.clock_gettime

    def slept(which: int) -> float:
        return boot(which) + DAY_S * (which == time.CLOCK_BOOTTIME)

    before_s = clock.now_s()
    monkeypatch.setattr(time, "clock_gettime", slept)
    assert before_s + DAY_S <= clock.now_s() < before_s + DAY_S + 60

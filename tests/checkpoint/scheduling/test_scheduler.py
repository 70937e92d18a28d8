"""When a save is due: the policy's word, the clock, a save in flight, and the preemption notice;
alone and in a group.
"""

from __future__ import annotations

import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    AnyOf,
    CheckpointManager,
    EveryNSeconds,
    EveryNSteps,
    FirstSave,
    OnPreemption,
    Options,
    Progress,
)
from holdfast.checkpoint.scheduling import scheduler as scheduler_module
from holdfast.checkpoint.scheduling.scheduler import SaveScheduler
from holdfast.multihost import Solo


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_alone_the_policy_and_the_clock_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a policy every step is saved; with one its reason is the answer; seconds count from
    the last save's start.
    """
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "time", clock)
    assert (
        SaveScheduler(None, Solo(), "s", skips=False).reason(7, busy=True)
        == "there is no save policy: every call saves"
    )
    by_step = SaveScheduler(EveryNSteps(5), Solo(), "s", skips=False)
    assert [step for step in range(11) if by_step.reason(step, busy=True)] == [0, 5, 10]
    by_clock = SaveScheduler(EveryNSeconds(60), Solo(), "s", skips=False)
    assert by_clock.reason(1, busy=False) == ""
    clock.now += 61
    assert by_clock.reason(2, busy=False) == "61.0 s since the last save, of 60 s"
    by_clock.started(2)
    assert by_clock.reason(3, busy=False) == ""
    by_clock.close()


def test_an_earlier_managers_step_is_the_last(tmp_path: Path) -> None:
    """The first save is wanted in an empty root alone, whoever saved there before."""
    for wanted in (True, False):
        with CheckpointManager(
            tmp_path, save_policy=AnyOf(FirstSave(), EveryNSteps(100))
        ) as manager:
            assert [step for step in (3, 4) if manager.save(step + wanted, {"x": step})] == (
                [3] if wanted else []
            )


def test_a_save_in_flight_skips_the_next() -> None:
    """With on_busy="skip" no step is due while a save is in flight, and the next one is after
    it.
    """
    scheduler = SaveScheduler(EveryNSteps(1), Solo(), "s", skips=True)
    assert (
        scheduler.reason(1, busy=True) == ""
        and scheduler.reason(2, busy=False) == "step 2 is a multiple of 1"
    )


def test_the_notice_is_asked_where_it_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notice makes its step due, until it is saved: with OnPreemption, or once the caller has
    asked about preemption itself.
    """
    monkeypatch.setattr(scheduler_module, "reached_preemption", lambda step: step == 9)
    for policy in (OnPreemption(), EveryNSteps(1000)):
        scheduler = SaveScheduler(policy, Solo(), "s", skips=False)
        assert scheduler.reason(9, busy=False) == (
            "the job is preempted" if isinstance(policy, OnPreemption) else ""
        )
        assert scheduler.preempted(9) and not scheduler.preempted(8)
        assert scheduler.reason(9, busy=False) == "the job is preempted"
        scheduler.started(9)
        assert scheduler.reason(9, busy=False) == ""


def tree(step: int) -> dict[str, object]:
    return {"w": jnp.arange(100.0) + step, "n": np.full(3, step)}


def test_save_returns_whether_the_policy_wanted_it(tmp_path: Path) -> None:
    """`save` returns False and writes nothing for a step that the policy does not want; `force`
    saves it.
    """
    with CheckpointManager(tmp_path, save_policy=EveryNSteps(10)) as manager:
        assert [step for step in range(25) if manager.save(step, tree(step))] == [0, 10, 20]
        assert not manager.should_save(25) and manager.save(25, tree(25), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 10, 20, 25]
    with CheckpointManager(tmp_path / "clock", save_policy=EveryNSeconds(3600)) as manager:
        assert not manager.save(0, tree(0))
    with CheckpointManager(tmp_path / "notice", save_policy=OnPreemption()) as manager:
        assert not manager.save(0, tree(0)) and not manager.reached_preemption(0)


def test_on_busy_skip_never_blocks(tmp_path: Path) -> None:
    """With on_busy="skip" a save that meets another in flight returns False; `force` waits for
    it.
    """
    gate = threading.Event()
    entered = threading.Event()

    def progress(seen: Progress) -> None:
        entered.set()
        gate.wait(60)

    with CheckpointManager(tmp_path, options=Options(on_busy="skip", progress=progress)) as manager:
        assert manager.save(1, tree(1))
        assert entered.wait(60)
        assert not manager.save(2, tree(2)) and not manager.save(3, tree(3))
        with pytest.raises(TimeoutError, match="step 1 is still in flight"):
            manager.wait_until_finished(timeout_s=0.01)
        gate.set()
        assert manager.save(4, tree(4), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 4]

"""When a save is due: the policy's word, the clock, a save in flight, and the preemption notice;
alone and in a group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    AnyOf,
    CheckpointError,
    CheckpointManager,
    EveryNSeconds,
    EveryNSteps,
    FirstSave,
    OnPreemption,
    Options,
    Progress,
    StepExists,
)
from holdfast.checkpoint.policy import SavePolicy
from holdfast.checkpoint.scheduling import scheduler as scheduler_module
from holdfast.checkpoint.scheduling.scheduler import SaveScheduler
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Notice, Solo, notify_preemption, reached_preemption
from holdfast.multihost.preemption import preemption


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


class Notified:
    """A sync point at which the job is preempted from `since` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, since: int) -> None:
        self.since: float = since
        for name in ("reached_preemption", "ask_sync_point"):
            monkeypatch.setattr(scheduler_module, name, self)

    def __call__(self, step: int) -> bool:
        return step >= self.since


def test_the_notice_is_asked_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice makes its step due, until it is saved: with OnPreemption, or once the caller has
    asked about preemption itself; not in a lane that does not heed it.
    """
    Notified(monkeypatch, since=9)
    for policy in (OnPreemption(), EveryNSteps(1000)):
        scheduler = SaveScheduler(policy, Solo(), "s", skips=False)
        assert scheduler.reason(9, busy=False) == (
            "the job is preempted" if isinstance(policy, OnPreemption) else ""
        )
        assert scheduler.preempted(9) and not scheduler.preempted(8)
        assert scheduler.reason(9, busy=False) == "the job is preempted"
        scheduler.started(9)
        assert scheduler.reason(9, busy=False) == ""
    deaf = SaveScheduler(OnPreemption(), Solo(), "s", skips=True, heeds_notices=False)
    assert deaf.reason(9, busy=False) == ""


@pytest.mark.parametrize("policy", [OnPreemption(), EveryNSteps(20), None])
def test_after_one_committed_step_all_is_as_ever(
    monkeypatch: pytest.MonkeyPatch, policy: SavePolicy | None
) -> None:
    """A loop that goes on after a notice saves one step for it. One that was merely begun, and
    failed, does not count; another notice is another step.
    """
    notified = Notified(monkeypatch, since=9)
    scheduler = SaveScheduler(policy, Solo(), "s", skips=False)

    def wanted(step: int) -> bool:
        scheduler.preempted(step)
        return bool(scheduler.reason(step, busy=False))

    usual = [step for step in range(11, 41) if policy is None or step == 20 or step == 40]
    if isinstance(policy, OnPreemption):
        usual = []
    assert wanted(9) and scheduler.is_preempted and not scheduler.needs_end(9)
    scheduler.started(9)
    assert not scheduler.needs_end(9) and scheduler.needs_end(10)
    assert wanted(10)  # the save of step 9 has failed
    scheduler.started(10)
    scheduler.note_last_committed()
    assert not scheduler.is_preempted
    assert [step for step in range(11, 41) if wanted(step)] == usual
    scheduler.started(40)
    assert not scheduler.needs_end(41)
    notified.since = 60
    wanted(41)
    assert wanted(60) and scheduler.is_preempted and scheduler.reason(61, busy=False)


@pytest.fixture
def notice() -> Iterator[None]:
    """A notice to this process, which has no job, and has asked for none."""
    preemption.stop()
    notify_preemption(Notice("the machine is taken"))
    yield
    preemption.stop()


@pytest.mark.usefixtures("notice")
@pytest.mark.parametrize("policy", [EveryNSteps(20), OnPreemption(), None])
def test_a_loop_that_never_asks_saves_one_step(tmp_path: Path, policy: SavePolicy | None) -> None:
    """And those that its policy wants; without a policy each `save` does. Nothing is raised."""
    with CheckpointManager(tmp_path, save_policy=policy) as manager:
        saved = [step for step in range(1, 31) if manager.save(step, tree(step))]
        manager.wait_until_finished()
        assert manager.all_steps() == saved
    assert saved == {EveryNSteps(20): [1, 20], OnPreemption(): [1]}.get(
        policy,  # type: ignore[arg-type]
        list(range(1, 31)),
    )


@pytest.mark.usefixtures("notice")
def test_a_last_save_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised once the next one has begun, which is the one step then."""
    with CheckpointManager(tmp_path / "a", save_policy=EveryNSteps(1_000_000)) as manager:
        with monkeypatch.context() as broken:
            broken.setattr(LocalStorage, "write", _fail)
            assert manager.save(1, tree(1))
            with pytest.raises(CheckpointError, match="no room"):
                manager.wait_until_finished()
        assert [step for step in range(2, 9) if manager.save(step, tree(step))] == [2]
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


@pytest.mark.parametrize("asks_first", [True, False])
def test_the_step_at_which_a_lone_program_stops_is_saved(tmp_path: Path, asks_first: bool) -> None:
    """As in a job of several, whatever the policy says, also where the program asks without the
    manager, and by numbers of its own.
    """
    preemption.stop()
    assert not reached_preemption(0)
    with CheckpointManager(tmp_path, save_policy=EveryNSteps(1_000_000)) as manager:
        assert not manager.save(1001, tree(1))
        notify_preemption(Notice("the machine is taken"))
        assert not asks_first or reached_preemption(1)
        assert manager.save(1002, tree(2))
        assert reached_preemption(1)
        manager.wait_until_finished()
        assert not manager.save(1003, tree(3)) and manager.all_steps() == [1002]
    preemption.stop()


@pytest.mark.parametrize("asks", ["manager", "program"])
@pytest.mark.parametrize("force", [False, True])
def test_the_last_step_may_be_saved_by_the_loop_and_at_its_stop(
    tmp_path: Path, asks: str, force: bool
) -> None:
    """A loop saves each tenth step, and the one at which it stops: where these are one, the second
    save does nothing. What is not there is saved, and elsewhere a step is there already.
    """
    preemption.stop()
    with CheckpointManager(tmp_path) as manager:
        manager.save(9, tree(9))
        with pytest.raises(StepExists):
            manager.save(9, tree(9), force=force)
        manager.save(10, tree(10))
        notify_preemption(Notice("the machine is taken"))
        assert manager.reached_preemption(10) if asks == "manager" else reached_preemption(10)
        assert not manager.save(10, tree(10), force=force)
        assert manager.save(11, tree(11), force=force)
        assert not manager.save(11, tree(11), force=force)
        with pytest.raises(StepExists):
            manager.save(10, tree(10), force=force)
        assert manager.all_steps() == [9, 10, 11]
    preemption.stop()


def test_a_program_that_goes_back_hears_of_a_notice(tmp_path: Path) -> None:
    """At the next step it asks about, though it has asked about higher ones; so does another run,
    into another root, that counts from 1.
    """
    preemption.stop()
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(200, tree(200))
        assert not manager.reached_preemption(300)
        manager.restore(200, tree(0))
        assert not manager.reached_preemption(201)
        notify_preemption(Notice("the machine is taken"))
        assert manager.reached_preemption(202)
    notify_preemption(None)
    assert not reached_preemption(300)
    with CheckpointManager(tmp_path / "b") as manager:
        assert not manager.reached_preemption(1)
        notify_preemption(Notice("the machine is taken"))
        assert manager.reached_preemption(2)
    preemption.stop()


def _fail(*arguments: object) -> None:
    raise OSError("no room")


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

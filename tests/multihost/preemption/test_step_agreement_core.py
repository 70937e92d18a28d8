"""The decision core: under every interleaving, all answers about one step are alike, and nobody
passes the agreed step.
"""

from __future__ import annotations

import random

import pytest

from holdfast.multihost.preemption.step_agreement_core import (
    KEPT_CHANGES,
    NEVER,
    Answer,
    StepLog,
    agreed_step,
)


def test_a_change_holds_beyond_the_highest_answer() -> None:
    """With floors 4, 7 and none, the step is 8; below it every answer is the old one, at and above
    it the new one.
    """
    logs = [StepLog() for _ in range(3)]
    logs[0].answer(4)
    logs[1].answer(7)
    floors = [log.freeze() for log in logs]
    assert floors == [4, 7, NEVER]
    for log in logs:
        log.decide(agreed_step(floors), "raised")
        assert [log.answer(step).value for step in (5, 7, 8, 9)] == ["", "", "raised", "raised"]


def test_a_change_before_any_question_holds_at_once() -> None:
    """A notice before step 0 is answered True at step 0, and at a negative step too."""
    log = StepLog()
    log.decide(agreed_step([log.freeze()]), "raised")
    assert log.answer(-5).value == "raised"


def test_a_frozen_log_repeats_its_answers() -> None:
    """Between freezing and deciding, steps at or below the floor are answered, higher ones are held
    back.
    """
    log = StepLog()
    log.answer(3)
    log.freeze()
    assert log.may_answer(3) and log.may_answer(1) and not log.may_answer(4)


def test_asking_every_seven_steps_misses_no_change() -> None:
    """The agreed step is 8; a loop that asks at 0, 7, 14, 21 gets it at 14, once as a change and
    for good as a value.
    """
    log = StepLog()
    log.answer(7)
    log.decide(agreed_step([log.freeze()]), "raised")
    answers = [log.answer(step) for step in (14, 14, 21, 14)]
    assert [answer.value for answer in answers] == ["raised"] * 4
    assert [answer.changed for answer in answers] == [True, True, False, True]


class World:
    """Some processes with their logs, and the rounds between them, moved by one random event at a
    time.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = rng.randint(1, 4)
        self.same_stride = rng.random() < 0.5
        stride = rng.randint(1, 7)
        self.strides = [
            stride if self.same_stride else rng.randint(1, 7) for _ in range(self.count)
        ]
        self.logs = [StepLog() for _ in range(self.count)]
        self.positions = [0] * self.count
        self.floors: dict[int, dict[int, int]] = {}
        self.decided: list[int] = []
        self.values: dict[int, str] = {}
        self.changed: dict[int, bool] = {}

    def event(self) -> None:
        process = self.rng.randrange(self.count)
        log = self.logs[process]
        step = self.positions[process]
        kind = self.rng.choice(["ask", "ask", "ask", "freeze", "decide", "learn"])
        if kind == "ask" and log.may_answer(step):
            answer = log.answer(step)
            assert self.values.setdefault(step, answer.value) == answer.value
            if self.same_stride:
                assert self.changed.setdefault(step, answer.changed) == answer.changed
            self.positions[process] += self.strides[process]
        elif kind == "freeze":
            self.floors.setdefault(log.round, {}).setdefault(process, log.freeze())
        elif kind == "decide" and len(self.floors.get(len(self.decided), {})) == self.count:
            self.decided.append(agreed_step(self.floors[len(self.decided)].values()))
        elif kind == "learn" and log.frozen and log.round < len(self.decided):
            log.decide(self.decided[log.round], str(log.round))


@pytest.mark.parametrize("block", range(4))
def test_all_answers_about_one_step_are_alike(block: int) -> None:
    """For any order of questions, freezes, decisions and their delivery, with strides alike or not,
    answers about a step never differ.
    """
    rounds = 0
    for seed in range(500 * block, 500 * (block + 1)):
        world = World(random.Random(seed))
        for _ in range(300):
            world.event()
        rounds += len(world.decided)
        for process in range(world.count):  # what was answered once is answered so at the end, too
            log = world.logs[process]
            assert all(
                log.answer(step).value == world.values[step]
                for step in range(0, log.floor + 1, world.strides[process])
            )
    assert rounds > 1000


def test_however_many_changes_a_log_keeps_the_last() -> None:
    """A save every other step, for long: memory is bounded, and what held of late is answered as
    ever, also after a step back.
    """
    log = StepLog()
    for step in range(0, 10_000, 2):
        assert not log.answer(step).changed
        log.decide(agreed_step([log.freeze()]), str(step))
        assert log.answer(step + 1) == Answer(str(step), True)
    assert (
        len(log._changes) <= 2 * KEPT_CHANGES
        and len(log._fired) <= 2 * KEPT_CHANGES
        and log.round == 5000
    )
    assert [
        log.answer(step).changed for step in (9998 - KEPT_CHANGES, 9999 - KEPT_CHANGES, 9998, 9999)
    ] == [False, True] * 2
    assert not log.answer(1).changed and log.answer(9999 - KEPT_CHANGES).value == str(
        9998 - KEPT_CHANGES
    )


def test_logs_that_forget_forget_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever each learns of the rounds: once all have come to one step, they answer alike about
    every step before it.
    """
    monkeypatch.setattr("holdfast.multihost.preemption.step_agreement_core.KEPT_CHANGES", 2)
    forgot = 0
    for seed in range(300):
        world = World(random.Random(seed))
        world.strides = world.strides[:1] * world.count
        for _ in range(400):
            world.event()
        end = max([*world.positions, *world.decided])
        for process, log in enumerate(world.logs):
            while log.round < len(world.decided):
                log.freeze()
                log.decide(world.decided[log.round], str(log.round))
            log.frozen = False
            for step in range(world.positions[process], end + world.strides[0], world.strides[0]):
                log.answer(step)
        answers = [
            [log.answer(step) for step in range(0, end, world.strides[0])] for log in world.logs
        ]
        assert answers == answers[:1] * world.count
        forgot += world.logs[0]._before.step != NEVER
    assert forgot > 50


def test_a_decision_at_a_published_floor_is_refused() -> None:
    """The invariant of the protocol is asserted: a round cannot take effect at or below a step
    already answered.
    """
    log = StepLog()
    log.answer(5)
    log.freeze()
    with pytest.raises(
        AssertionError, match="decided for step 5, at or below the published floor 5"
    ):
        log.decide(5, "raised")

"""No life of a job breaks a rule of the launcher, whatever meets in it."""

from __future__ import annotations

import pytest

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.job import State

from .found import FOUND
from .happenings import Notice, Room
from .lives import Life, divergence_of, life_of, shortest, trace_of
from .program import Program

FAST = 300


def check(seeds: range) -> None:
    """Asserts that the lives of these seeds break no rule."""
    for seed in seeds:
        divergence = divergence_of(life_of(seed))
        assert divergence is None, f"seed {seed}: {shortest(divergence)}"


@pytest.mark.parametrize("name", FOUND)
def test_a_life_that_once_broke_a_rule_breaks_none(name: str) -> None:
    """Each is the shortest that showed a defect."""
    divergence = divergence_of(FOUND[name])
    assert divergence is None, str(divergence)


def test_a_share_of_lives_breaks_no_rule() -> None:
    """The first ones; the slow tests take the others."""
    check(range(FAST))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("thousand", range(10))
def test_many_lives_break_no_rule(thousand: int) -> None:
    """With policies, programs and happenings by chance."""
    check(range(1000 * thousand, 1000 * (thousand + 1)))


@pytest.mark.parametrize("delivered", [False, True])
def test_after_a_notice_for_one_process_the_others_stay(delivered: bool) -> None:
    """A life of the model comes there, and breaks no rule."""
    notice = Notice(1, 8.0, "d", delivered=delivered, process=1)
    life = Life((notice,), RestartPolicy(max_preemptions=1), Program(outlives=True))
    assert divergence_of(life) is None
    trace = trace_of(life)
    assert [step.after.going for step in trace.steps if step.is_new_attempt][1:] == [{1}]
    assert trace.last.state is State.FINISHED


@pytest.mark.parametrize(("room", "then"), [(2, 4), (4, 3)])
def test_where_there_is_other_room_those_that_can_stay_do(room: int, then: int) -> None:
    """Lives of the model come there, and break no rule."""
    policy = RestartPolicy(max_preemptions=1, grow_after_s=0.0)
    life = Life((Room(1, 8.0, then),), policy, Program(outlives=True), processes=4, room=room)
    assert divergence_of(life) is None
    trace = trace_of(life)
    (again,) = [step for step in trace.steps if step.is_new_attempt][1:]
    assert (again.after.num_processes, len(again.after.staying)) == (then, min(room, then))
    assert again.after.surplus == frozenset(range(then, room))
    assert trace.last.state is State.FINISHED


def test_lives_come_everywhere() -> None:
    """They pass each state, and end with each exit code that is documented."""
    states: set[State] = set()
    codes: set[int] = set()
    for seed in range(FAST):
        trace = trace_of(life_of(seed))
        states |= {step.after.state for step in trace.steps}
        codes.add(trace.last.exit_code)
    assert states == set(State) - {State.INITIALIZING}
    assert codes >= {0, 1, 75, 93, 124, 137}

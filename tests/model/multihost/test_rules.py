"""The rules see what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.coordination import BarrierTimeout, CoordinationError, CoordinatorLost, ProcessLost

from .rules import (
    SLACK_S,
    Case,
    Told,
    alike,
    distinct,
    ends_well,
    in_time,
    meets_or_fails,
    nobody_is_lost,
    one_answer_a_step,
    one_change,
    typed,
)

Rule = Callable[[Case], Iterator[str]]
LOST = ProcessLost("lost", process=1)
TIMED_OUT = BarrierTimeout("timed out", missing=(1,))


def case(*told: Any, **words: Any) -> Case:
    """Returns a call of three processes with the values and errors that the first ones were
    told.
    """
    answers = [
        Told(error=each, ended_s=1.0) if isinstance(each, Exception) else Told(each, ended_s=1.0)
        for each in told
    ]
    sets = {name: frozenset(value) for name, value in words.items()}
    return Case((0, 1, 2), dict(enumerate(answers)), 1.0, **sets)


BREAKS: dict[str, tuple[Rule, Case]] = {
    "too late": (in_time, Case((0,), {0: Told(ended_s=SLACK_S + 1.1)}, 1.0)),
    "of no type": (typed, case(KeyError("a"))),
    "of the wrong type": (typed, case(CoordinationError("counter mismatch"))),
    "lost, and lives": (nobody_is_lost, case(LOST)),
    "failed, though all came": (meets_or_fails, case(TIMED_OUT, None, None)),
    "passed without one": (meets_or_fails, case(TIMED_OUT, None, absent=[1])),
    "names another": (meets_or_fails, case(TIMED_OUT, absent=[2])),
    "names not all": (meets_or_fails, case(TIMED_OUT, absent=[1, 2])),
    "values differ": (alike, case(1, 2)),
    "ended badly": (ends_well, case(CoordinatorLost("lost"))),
}
KEEPS: dict[str, tuple[Rule, Case]] = {
    "in time": (in_time, Case((0,), {0: Told(ended_s=SLACK_S + 0.9)}, 1.0)),
    "all passed": (meets_or_fails, case(None, None, None)),
    "all failed": (meets_or_fails, case(TIMED_OUT, TIMED_OUT, absent=[1])),
    "a dead one is lost": (meets_or_fails, case(LOST, TIMED_OUT, gone=[1])),
    "lost, and dying": (nobody_is_lost, case(LOST, dying=[1])),
    "one value": (alike, case(1, 1, TIMED_OUT)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_seen(name: str) -> None:
    """A sentence says what broke it."""
    rule, told = BREAKS[name]
    assert list(rule(told))


@pytest.mark.parametrize("name", KEEPS)
def test_a_kept_rule_is_not_taken_for_broken(name: str) -> None:
    """Nothing is said."""
    rule, told = KEEPS[name]
    assert not list(rule(told))


def test_one_step_has_one_answer() -> None:
    """Whoever asks; and no process is told false where another was told true before."""
    assert not list(one_answer_a_step({0: [(1, False), (2, True)], 1: [(2, True)]}))
    assert list(one_answer_a_step({0: [(1, False)], 1: [(1, True)]}))
    assert not list(one_change({0: [(1, False), (3, True)], 1: [(2, False)]}))
    assert list(one_change({0: [(1, False), (3, True)], 1: [(4, False)]}))


def test_increments_are_told_apart() -> None:
    """No number twice, none that nobody made, none that falls."""
    assert not list(distinct("count", {0: [1, 4], 1: [2]}, attempts=4))
    assert list(distinct("count", {0: [1], 1: [1]}, attempts=2))
    assert list(distinct("count", {0: [3]}, attempts=2))
    assert list(distinct("count", {0: [2, 1]}, attempts=2))

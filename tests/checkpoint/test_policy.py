"""Policies decide by their arguments alone, and say why."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import (
    AnyOf,
    AtSteps,
    EveryNSeconds,
    EveryNSteps,
    FirstSave,
    KeepAll,
    KeepAnyOf,
    KeepBest,
    KeepClosestTo,
    KeepEvery,
    KeepEverySeconds,
    KeepLast,
    KeepLatestFor,
    KeepPolicy,
    OnPreemption,
)
from holdfast.checkpoint.policy import (
    CLOCK_SLACK_S,
    PolicyContext,
    StepFacts,
    best_rule,
    contradicted_steps,
    to_delete,
)

STEPS = [
    StepFacts(step, {"loss": loss})
    for step, loss in [(0, 3.0), (10, 1.0), (20, 2.0), (30, math.nan), (40, 1.0)]
] + [StepFacts(50)]


@pytest.mark.parametrize(
    ("policy", "context", "reason"),
    [
        (EveryNSteps(10), PolicyContext(20), "step 20 is a multiple of 10"),
        (EveryNSteps(10), PolicyContext(21), ""),
        (
            EveryNSeconds(600),
            PolicyContext(21, elapsed_s=601),
            "601.0 s since the last save, of 600 s",
        ),
        (EveryNSeconds(600), PolicyContext(21, elapsed_s=599), ""),
        (AtSteps({3, 5}), PolicyContext(5), "step 5 is named"),
        (AtSteps({3, 5}), PolicyContext(4), ""),
        (OnPreemption(), PolicyContext(7, preempted=True), "the job is preempted"),
        (OnPreemption(), PolicyContext(7, last_step=7, preempted=True), ""),
        (OnPreemption(), PolicyContext(7), ""),
        (FirstSave(), PolicyContext(7), "no step is saved yet"),
        (FirstSave(), PolicyContext(7, last_step=3), ""),
        (AnyOf(EveryNSteps(10), AtSteps({7})), PolicyContext(7), "step 7 is named"),
        (AnyOf(), PolicyContext(7), ""),
    ],
)
def test_a_save_policy_gives_its_reason(
    policy: object, context: PolicyContext, reason: str
) -> None:
    """Each save policy answers with the sentence that says why, or nothing."""
    assert policy.wants(context) == reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        (KeepLast(3), [0, 10, 20]),
        (KeepLast(30), []),
        (KeepEvery(20), [10, 30]),
        (KeepBest(1, "loss"), [0, 10, 20, 30]),
        (KeepBest(1, "loss", mode="max"), [10, 20, 30, 40]),
        (KeepBest(9, "accuracy"), []),
        (KeepAnyOf(KeepLast(1), KeepBest(1, "accuracy")), []),
        (KeepAnyOf(KeepLast(1), KeepEvery(30)), [10, 20, 40]),
        (KeepAll(), []),
        (KeepClosestTo(30), [10, 20, 40]),
        (KeepClosestTo(100), [10, 20, 30, 40]),
        (KeepClosestTo(7), []),
    ],
)
def test_a_keep_policy_lets_steps_go_oldest_first(policy: object, deleted: list[int]) -> None:
    """What no policy keeps goes, oldest first; the newest stays; of equal metrics the newer is
    better; NaN is never best. A KeepBest whose metric no step has keeps all.
    """
    assert to_delete(policy, STEPS) == deleted  # type: ignore[arg-type]


def _timed(*times_s: float | None) -> list[StepFacts]:
    return [StepFacts(step, started_s=time_s) for step, time_s in enumerate(times_s)]


def test_of_equally_close_steps_the_newer_stays() -> None:
    """Steps that the clock chose lie around the multiples: 9 and 11 are as close to 10, and 14 is
    closer to 10 than to 20.
    """
    assert KeepClosestTo(10).keeps([StepFacts(step) for step in (2, 9, 11, 14, 18, 23, 26)]) == {
        2,
        11,
        18,
        26,
    }


@pytest.mark.parametrize(
    ("policy", "times_s", "deleted"),
    [
        (KeepLatestFor(100), [0, 899, 900, 950, 1000], [0, 1]),
        (KeepLatestFor(100), [None, 0, 1000], [1]),
        (KeepLatestFor(100), [None, None], []),
        (
            KeepLatestFor(10),
            [1000, 500, 400],
            [1],
        ),  # the job went back to an older step: the newest step stays nevertheless
        (KeepEverySeconds(60), [0, 30, 60, 61, 119, 120, 130], [1, 3, 4]),
        (KeepEverySeconds(60), [0, None, 30, 90], [2]),
        (KeepAnyOf(KeepLatestFor(20), KeepEverySeconds(60)), [0, 30, 60, 75, 90], [1]),
    ],
)
def test_steps_are_kept_by_their_times(
    policy: KeepPolicy, times_s: list[float | None], deleted: list[int]
) -> None:
    """It is as late as the newest step; whose time is not known stays; what is kept for good lies
    the seconds apart.
    """
    assert to_delete(policy, _timed(*times_s)) == deleted


DAY_S = 86400.0
YEAR_S = 365 * DAY_S
FOR_A_DAY = KeepLatestFor(DAY_S)


@pytest.mark.parametrize(
    ("policy", "writers", "times_s", "deleted"),
    [
        (FOR_A_DAY, "aabbcc", [0, 1, YEAR_S, YEAR_S + 1, 2, 3], []),  # b's clock was ahead
        (FOR_A_DAY, "aabbc", [YEAR_S, YEAR_S + 1, 2, 3, YEAR_S + 4], []),  # b's was behind
        (FOR_A_DAY, "aabc", [0, 1, YEAR_S, 2 * YEAR_S], [0, 1, 2]),  # or else b came later
        (FOR_A_DAY, "aabb", [0, 90, 60, 2 * DAY_S], [0, 1, 2]),  # clocks always differ a little
        (FOR_A_DAY, "aaaa", [0, YEAR_S, 1, 2], [0, 2]),  # one clock: the job went back
        (FOR_A_DAY, "abac", [None, 0, None, 2 * DAY_S], [1]),
        (KeepEverySeconds(60), "abbb", [YEAR_S, 0, 1, 2], []),
        (KeepEverySeconds(60), "abbb", [0, 1, 2, 3], [1, 2]),
    ],
)
def test_times_that_contradict_each_other_delete_nothing(
    policy: KeepPolicy, writers: str, times_s: list[float | None], deleted: list[int]
) -> None:
    """A step stays where its time and that of another manager's step are not in the order of the
    steps, until they are; within one manager all times count.
    """
    steps = [
        StepFacts(step, started_s=time_s, writer=writer)
        for step, (writer, time_s) in enumerate(zip(writers, times_s, strict=True))
    ]
    assert to_delete(policy, steps) == deleted


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1e3)), max_size=30))
def test_contradictions_are_found_in_pairs(times: list[tuple[str, float]]) -> None:
    """A step is contradicted if there is a pair of it and another manager's step that is."""
    steps = [
        StepFacts(step, started_s=time_s, writer=writer)
        for step, (writer, time_s) in enumerate(times)
    ]
    expected = set()
    for low, high in itertools.combinations(steps, 2):
        assert low.started_s is not None and high.started_s is not None
        if low.writer != high.writer and low.started_s > high.started_s + CLOCK_SLACK_S:
            expected |= {low.step, high.step}
    assert contradicted_steps(steps) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(1, 1e5))
def test_what_every_seconds_keeps_stays_kept(times_s: list[float], seconds: float) -> None:
    """Deciding after each save keeps the same steps as deciding once at the end, but for the
    newest.
    """
    steps = _timed(*sorted(times_s))
    there = list[StepFacts]()
    for facts in steps:
        there.append(facts)
        gone = to_delete(KeepEverySeconds(seconds), there)
        there = [each for each in there if each.step not in gone]
    assert {each.step for each in there} == KeepEverySeconds(seconds).keeps(steps) | {
        steps[-1].step
    }


def test_best_is_what_the_keep_policy_says() -> None:
    """`best_step()` takes metric and mode from the KeepBest inside the keep policy."""
    rule = KeepBest(2, "loss")
    assert (
        best_rule(KeepAnyOf(KeepLast(1), KeepAnyOf(rule))) == rule
        and best_rule(KeepLast(1)) is None
    )
    assert rule.ranked(STEPS) == [40, 10, 20, 0]
    accuracy = KeepBest(2, "accuracy", "max")
    both = KeepAnyOf(rule, accuracy)
    assert best_rule(both, "accuracy") == accuracy
    assert best_rule(both, "accuracy", "min") == replace(accuracy, mode="min")
    assert best_rule(both, mode="max") == replace(rule, mode="max")
    assert best_rule(both, "other") == KeepBest(1, "other")


def test_numbers_of_numpys_count_as_pythons() -> None:
    """They neither wrap around nor overflow."""
    assert KeepLast(np.uint32(1)).keeps(STEPS) == KeepLast(1).keeps(STEPS)  # type: ignore[arg-type]
    every = EveryNSteps(np.int16(500))  # type: ignore[arg-type]
    assert every.wants(PolicyContext(40_000)) and every == EveryNSteps(500)


def test_policies_are_values() -> None:
    """Policies compare, hash and print as what they are; nonsense is refused with the name of the
    field.
    """
    assert (
        AnyOf(EveryNSteps(1), AtSteps([2])) == AnyOf(EveryNSteps(1), AtSteps({2}))
        and repr(AtSteps([2, 1])) == "AtSteps([1, 2])"
    )
    assert len({KeepLast(1), KeepLast(1), KeepAll(), AtSteps([1]), AtSteps([1])}) == 3
    with pytest.raises(ValueError, match="EveryNSteps: n must be above 0, found 0"):
        EveryNSteps(0)
    for refused in (KeepClosestTo, KeepLatestFor, KeepEverySeconds):
        with pytest.raises(ValueError, match="must be above 0, found -1"):
            refused(-1)
    with pytest.raises(ValueError, match="mode is"):
        KeepBest(1, "loss", mode="least")  # type: ignore[arg-type]

"""Policies decide by their arguments alone, and say why."""

from __future__ import annotations

import math

import pytest

from holdfast.checkpoint import AnyOf, AtSteps, EveryNSeconds, EveryNSteps, KeepAll, KeepAnyOf, KeepBest, KeepEvery, KeepLast, OnPreemption
from holdfast.checkpoint.policy import PolicyContext, StepFacts, best_rule, to_delete

STEPS = [StepFacts(step, {"loss": loss}) for step, loss in [(0, 3.0), (10, 1.0), (20, 2.0), (30, math.nan), (40, 1.0)]] + [StepFacts(50)]


@pytest.mark.parametrize(
    ("policy", "context", "reason"),
    [
        (EveryNSteps(10), PolicyContext(20), "step 20 is a multiple of 10"),
        (EveryNSteps(10), PolicyContext(21), ""),
        (EveryNSeconds(600), PolicyContext(21, elapsed_s=601), "601.0 s since the last save, of 600 s"),
        (EveryNSeconds(600), PolicyContext(21, elapsed_s=599), ""),
        (AtSteps({3, 5}), PolicyContext(5), "step 5 is named"),
        (AtSteps({3, 5}), PolicyContext(4), ""),
        (OnPreemption(), PolicyContext(7, preempted=True), "the job is preempted"),
        (OnPreemption(), PolicyContext(7, last_step=7, preempted=True), ""),
        (OnPreemption(), PolicyContext(7), ""),
        (AnyOf(EveryNSteps(10), AtSteps({7})), PolicyContext(7), "step 7 is named"),
        (AnyOf(), PolicyContext(7), ""),
    ],
)
def test_a_save_policy_gives_its_reason(policy: object, context: PolicyContext, reason: str) -> None:
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
        (KeepBest(9, "accuracy"), [0, 10, 20, 30, 40]),
        (KeepAnyOf(KeepLast(1), KeepEvery(30)), [10, 20, 40]),
        (KeepAll(), []),
    ],
)
def test_a_keep_policy_lets_steps_go_oldest_first(policy: object, deleted: list[int]) -> None:
    """What no policy keeps goes, oldest first; the newest stays; of equal metrics the newer is better; NaN is never best."""
    assert to_delete(policy, STEPS) == deleted  # type: ignore[arg-type]


def test_a_held_step_stays() -> None:
    """A step that a reader holds outlives the keep policy."""
    assert to_delete(KeepLast(1), STEPS, held=[10, 30]) == [0, 20, 40]


def test_best_is_what_the_keep_policy_says() -> None:
    """`best_step()` takes metric and mode from the KeepBest inside the keep policy."""
    rule = KeepBest(2, "loss")
    assert best_rule(KeepAnyOf(KeepLast(1), KeepAnyOf(rule))) == rule and best_rule(KeepLast(1)) is None
    assert rule.ranked(STEPS) == [40, 10, 20, 0]


def test_policies_are_values() -> None:
    """Policies compare, hash and print as what they are; nonsense is refused with the name of the field."""
    assert AnyOf(EveryNSteps(1), AtSteps([2])) == AnyOf(EveryNSteps(1), AtSteps({2})) and repr(AtSteps([2, 1])) == "AtSteps([1, 2])"
    assert len({KeepLast(1), KeepLast(1), KeepAll(), AtSteps([1]), AtSteps([1])}) == 3
    with pytest.raises(ValueError, match="EveryNSteps: n must be above 0, found 0"):
        EveryNSteps(0)
    with pytest.raises(ValueError, match="mode is"):
        KeepBest(1, "loss", mode="least")  # type: ignore[arg-type]

"""The right sides of rules."""

from __future__ import annotations

from holdfast.checkpoint import Add, Cast, Rename, Stack, Transpose
from holdfast.checkpoint.restoring.surgery_rules import Steps, steps_of


def test_a_right_side_is_what_comes_before_and_after_the_name() -> None:
    """One rule, a text for a new name, or several rules in order."""
    assert steps_of("w", "x") == steps_of("w", Rename("x")) == Steps(naming=Rename("x"))
    assert steps_of("w", Cast("int8")) == Steps(before=(Cast("int8"),))
    assert steps_of("w", [Transpose(), Stack("x"), Cast("int8")]) == Steps(
        (Transpose(),), Stack("x"), (Cast("int8"),)
    )
    assert steps_of("w", Add(3)) == Add(3)

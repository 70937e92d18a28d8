"""Claims: who may be fenced."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.steps.claims import Writer, may_fence
from holdfast.coordination import Fenced


@pytest.mark.parametrize(
    ("other", "me", "dead", "reason"),
    [
        (
            Writer("a", "j", 1, "h", 7),
            Writer("b", "j", 2),
            False,
            "writer a is attempt 1 of job 'j', which is now at attempt 2",
        ),
        (Writer("a", "j", 1, "h", 7), Writer("b", "k", 2), False, ""),
        (Writer("a", "", 1, "h", 7), Writer("b", "", 2), False, ""),
        (Writer("a", "j", 2, "h", 7), Writer("b", "j", 2), False, ""),
        (Writer("a", "", 0, "h", 7), Writer("b", "", 0), True, "writer a (pid 7 on h) is dead"),
        (
            Writer("a", "j", 3, launched_ms=1),
            Writer("b", "j", 1, launched_ms=2),
            False,
            "writer a is of an earlier run of job 'j'",
        ),
        (Writer("a", "j", 3, launched_ms=2), Writer("b", "j", 1, launched_ms=1), False, ""),
    ],
)
def test_who_may_be_fenced(other: Writer, me: Writer, dead: bool, reason: str) -> None:
    """The dead, lower attempts of the same job, and earlier runs of it, which had attempts of their
    own; nobody else.
    """
    assert may_fence(other, me, dead=dead) == reason


def test_a_lower_attempt_must_stop() -> None:
    """A writer that meets a higher attempt of its own job is the one to stop."""
    with pytest.raises(
        Fenced, match=r"attempt 3 of job 'j' writes here .*; this is attempt 2: stop"
    ):
        may_fence(Writer("a", "j", 3), Writer("b", "j", 2), dead=False)

"""One exchange among all processes: how an error crosses, and which one all processes raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.checkpoint import CheckpointError, Corrupt, SaveFailed
from holdfast.checkpoint.agreement.exchange import (
    Answer,
    Outcome,
    ask_primary,
    exchange,
    first_failed,
    raise_of_any,
)
from holdfast.checkpoint.agreement.messages import SentError
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups


def test_the_first_failure_is_everybodys() -> None:
    """A failure that comes later gives way to any other; without failures there is none."""
    full = SentError("OSError", "full")
    outcomes = [Outcome(0), Outcome(1, full), Outcome(2, full)]
    assert first_failed(outcomes) == outcomes[1]
    assert first_failed(outcomes, lambda outcome: outcome.process == 1) == outcomes[2]
    assert first_failed(outcomes[:1]) is None


def test_reports_make_one_answer() -> None:
    """The primary decides by all reports, in rank order, and all processes hear it."""

    def exchanged(group: Group) -> Answer:
        def decide(answers: list[Answer]) -> Answer:
            return Answer(value=[answer.value for answer in answers])

        return exchange(group, "x", Answer(value=group.index), decide, Answer, timeout_s=30)

    with groups(3) as all_three:
        found = at_once([lambda g=g: exchanged(g) for g in all_three])  # type: ignore[misc]
    assert found == [Answer(value=[0, 1, 2])] * 3


def test_the_error_of_any_is_raised_by_all() -> None:
    """Each process that failed raises its own; where none did, all go on."""

    def ended(group: Group, *failing: int) -> str:
        own = SaveFailed(f"of {group.index}") if group.index in failing else None
        try:
            raise_of_any(group, "end", own, 30)
        except SaveFailed as error:
            return str(error)
        return "well"

    with groups(3) as all_three:
        ends = at_once([lambda g=g: ended(g, 1, 2) for g in all_three])  # type: ignore[misc]
        assert ends == ["of 1", "of 1", "of 2"]
        assert at_once([lambda g=g: ended(g) for g in all_three]) == ["well"] * 3  # type: ignore[misc]


def test_no_answer_is_taken_for_another_questions() -> None:
    """A process that did not come to ask a question passes its answer over."""
    with groups(2) as (primary, other):

        def asks(group: Group, question: str) -> Any:
            return ask_primary(group, "x", lambda: f"to {question}", 30, question=question)

        assert asks(primary, "a") == "to a"
        found = at_once([lambda: asks(primary, "b"), lambda: asks(other, "b")])
    assert found == ["to b", "to b"]


def test_the_primary_is_asked() -> None:
    """Its answer, or its error, on every process."""

    def asked(group: Group, answer: Callable[[], Any]) -> Any:
        try:
            return ask_primary(group, "steps", answer, 30)
        except CheckpointError as error:
            return type(error), error.process, error.path

    def fail() -> None:
        raise Corrupt("damaged", path="p")

    with groups(2) as both:
        assert (
            at_once([lambda group=group: asked(group, lambda: [group.index, 5]) for group in both])
            == [[0, 5]] * 2
        )
        assert at_once([lambda group=group: asked(group, fail) for group in both]) == [
            (Corrupt, None, "p"),
            (Corrupt, 0, "p"),
        ]

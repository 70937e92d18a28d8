"""One exchange among all processes: how an error crosses, and which one all processes raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.checkpoint import CheckpointError, CommitUnknown, Corrupt, SaveFailed, StepExists
from holdfast.checkpoint.agreement.exchange import (
    AgreedError,
    Answer,
    Outcome,
    SentError,
    ask_primary,
    exchange,
    first_failed,
    raise_of_any,
)
from holdfast.coordination import Fenced, HoldfastError
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups


class Unsent(CheckpointError):
    """An error of a kind that does not cross as itself."""

    hint: str = ""


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("else", path="/x"),
        CommitUnknown("who knows", step=100, path="/x"),
        Corrupt("bad bytes", path="/x", file="a", leaf="w"),
        Fenced("fenced"),
        SaveFailed("no", step=3, process=0, leaf="w"),
        StepExists("there", step=0),
    ],
)
def test_what_is_sent_is_what_is_raised(error: HoldfastError) -> None:
    """Class, sentence and fields survive JSON; nothing else travels."""
    error.__cause__ = OSError("mine")
    outcome = Outcome.from_bytes(Outcome(1, SentError.of(error)).to_bytes())
    assert outcome.error is not None
    found = outcome.error.rebuilt()
    assert (
        type(found) is type(error)
        and found.message == error.message
        and vars(found) == vars(error)
        and found.__cause__ is None
    )


def test_an_unknown_kind_becomes_a_known_one() -> None:
    """Its kind is in the sentence; it keeps the fields that the known kind has."""
    sent = SentError.of(Unsent("bad bytes", path="/x", hint="a"))
    found = sent.rebuilt(unknown=SaveFailed)
    assert type(found) is SaveFailed and str(found) == "Unsent: bad bytes"
    assert found.path == "/x" and not hasattr(found, "hint")


def test_the_first_failure_is_everybodys() -> None:
    """A failure that comes later gives way to any other; without failures there is none."""
    full = SentError("OSError", "full")
    outcomes = [Outcome(0), Outcome(1, full), Outcome(2, full)]
    assert first_failed(outcomes) == outcomes[1]
    assert first_failed(outcomes, lambda outcome: outcome.process == 1) == outcomes[2]
    assert first_failed(outcomes[:1]) is None


def test_each_process_makes_its_own_error() -> None:
    """A process with an error of the agreed kind raises that one; the others name the process."""
    agreed = AgreedError(1, SentError("Corrupt", "damaged", {"path": "f"}))
    own = Corrupt("mine")
    assert agreed.here(0, own) is own and own.process == 0
    other = CheckpointError("else")
    found = agreed.here(2, other)
    assert str(found) == "process 1: damaged" and found.__cause__ is other
    named = AgreedError(1, SentError("SaveFailed", "process 1 failed", {"process": 1}))
    assert str(named.here(0, None)) == "process 1 failed"


def test_reports_make_one_answer() -> None:
    """The primary decides by all reports, in rank order, and all processes hear it."""

    def exchanged(group: Group) -> bytes:
        return exchange(group, "x", b"%d" % group.index, b",".join, 30)

    with groups(3) as all_three:
        assert at_once([lambda g=g: exchanged(g) for g in all_three]) == [b"0,1,2"] * 3  # type: ignore[misc]


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


def test_an_answer_survives_the_wire() -> None:
    """A value or an error, by name."""
    for sent in (Answer("a", [1, {"a": None}]), Answer(error=SentError("OSError", "full"))):
        assert Answer.from_bytes(sent.to_bytes()) == sent


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

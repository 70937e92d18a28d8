"""What processes tell each other comes back as it went: by the type hints of its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from holdfast.checkpoint import CheckpointError, CommitUnknown, Corrupt, SaveFailed, StepExists
from holdfast.checkpoint.agreement.exchange import Answer, Outcome
from holdfast.checkpoint.agreement.messages import LONG_BYTES, AgreedError, Message, SentError
from holdfast.checkpoint.agreement.save_protocol import SaveKey, SaveResult
from holdfast.coordination import Fenced, HoldfastError


class Place(NamedTuple):
    row: int
    name: str


@dataclass(frozen=True)
class Part:
    places: tuple[Place, ...]
    pair: tuple[int, str]


@dataclass(frozen=True)
class Sent(Message):
    part: Part | None = None
    by_number: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    rows: list[list[int]] = field(default_factory=list)
    value: Any = None
    text: str = ""


PART = Part((Place(1, "a"), Place(2, "b")), (3, "c"))


@pytest.mark.parametrize(
    "sent",
    [
        Sent(),
        Sent(PART, {1: (2, 3), 4: ()}, [PART], [[1], []], {"a": [1, None]}),
        Sent(value=False),
        Sent(text="long " * LONG_BYTES),
    ],
)
def test_a_message_is_what_it_was(sent: Sent) -> None:
    """Whatever is in it, long or short; what is as by default costs no byte."""
    data = sent.to_bytes()
    assert Sent.from_bytes(data) == sent
    assert len(data) <= LONG_BYTES
    assert b"text" not in Sent(PART).to_bytes()


def test_an_error_in_a_message_is_one_of_ours() -> None:
    """Of its own kind, or a failed save."""
    key = SaveKey("id", 1, 2)
    for error, kind in ((Fenced("fenced"), Fenced), (Unsent("bad"), SaveFailed)):
        found = SaveResult.from_bytes(SaveResult(key, error).to_bytes())
        assert type(found.error) is kind and found.key == key


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


def test_an_answer_survives_the_wire() -> None:
    """A value or an error, by name."""
    for sent in (Answer("a", [1, {"a": None}]), Answer(error=SentError("OSError", "full"))):
        assert Answer.from_bytes(sent.to_bytes()) == sent

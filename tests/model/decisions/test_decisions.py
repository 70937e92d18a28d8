"""Every sequence of events keeps what a launcher promises; a rule that is taken back breaks it."""

from __future__ import annotations

import pytest

from .mutations import MUTATIONS, Mutation
from .search import search
from .transcripts import FOLDER, pages

FAST = 4  # events after the start: some 9,000 decisions
LONG = 6  # 384,000


def test_every_short_sequence_keeps_the_promises() -> None:
    found = search(FAST)
    assert found.broken is None, (found.broken, found.story)
    assert found.decisions > 5_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_sequence_keeps_the_promises() -> None:
    found = search(LONG)
    assert found.broken is None, (found.broken, found.story)
    assert found.decisions > 300_000


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_rule_that_is_taken_back_is_missed(mutation: Mutation) -> None:
    """The shortest story that misses it breaks the promise of its name."""
    found = search(FAST, mutation.applied())
    assert found.broken is not None, "no promise misses it"
    assert found.broken.promise == mutation.breaks, found.story


def test_transcripts_are_what_is_decided() -> None:
    """Each page is told anew by the real function, and is the same to the letter. Where it has
    changed on purpose, `python -m tests.model.decisions.transcripts` writes them.
    """
    assert {path.name: path.read_text() for path in FOLDER.glob("*.md")} == pages()

"""The transcripts in tests/transcripts are what the code does."""

from __future__ import annotations

import pytest

from tests.model.promise import Broken

from .mutations import MUTATIONS, Mutation
from .transcripts import FOLDER, pages

CHANGING = (
    "an error of a commit is a refusal",
    "a sweep buries nobody in a bucket",
    "a record's name is not synced",
    "what is left is marked after the commit",
)


def _written() -> dict[str, str]:
    return {path.name: path.read_text() for path in FOLDER.glob("*.md")}


def test_transcripts_are_what_the_code_does() -> None:
    """Each page is written anew by the real code, and is the same to the letter. Where the code has
    changed on purpose, `python -m tests.model.exhaustive.transcripts` writes them.
    """
    assert _written() == pages()


@pytest.mark.parametrize(
    "mutation",
    [each for each in MUTATIONS if each.name in CHANGING],
    ids=lambda mutation: mutation.name,
)
def test_a_rule_that_goes_changes_a_transcript(mutation: Mutation) -> None:
    """Or its story breaks an invariant on the way."""
    with mutation.taken_back():
        try:
            changed = pages() != _written()
        except Broken as broken:
            changed = broken.promise in mutation.breaks
    assert changed

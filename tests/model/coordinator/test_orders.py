"""Every order of events at a barrier keeps its promises; a rule that is taken back breaks one."""

from __future__ import annotations

import pytest

from .mutations import MUTATIONS, Mutation
from .search import search
from .transcripts import FOLDER, page
from .world import FAULTS, Bounds

FAST = [Bounds(1, FAULTS, 1), Bounds(1, frozenset({"break", "restart", "late"}), 3)]
LONG = [
    Bounds(1, FAULTS, 2),
    Bounds(2, FAULTS, 1),
    Bounds(2, FAULTS, 1, recoverable=False),
    Bounds(2, frozenset({"break", "restart", "forget"}), 2),
]


def _name(bounds: Bounds) -> str:
    return f"{bounds.rounds} rounds, {bounds.most} of {', '.join(sorted(bounds.faults))}"


@pytest.mark.parametrize("bounds", FAST, ids=_name)
def test_every_order_keeps_the_promises(bounds: Bounds) -> None:
    found = search(bounds)
    print(f"{found.states:,} states, {found.events:,} events")
    assert found.broken is None, (found.broken, found.story)
    assert found.states > 1_000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bounds", LONG, ids=_name)
def test_every_order_with_more_faults_keeps_the_promises(bounds: Bounds) -> None:
    found = search(bounds)
    print(f"{found.states:,} states, {found.events:,} events")
    assert found.broken is None, (found.broken, found.story)
    assert found.states > 1_000


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_rule_that_is_taken_back_is_missed(mutation: Mutation) -> None:
    """The shortest story that misses it breaks one of the promises named."""
    with mutation.applied():
        found = search(mutation.bounds)
    assert found.broken is not None, "no promise misses it"
    assert found.broken.promise in mutation.breaks, found.story


def test_the_transcript_is_what_the_machine_does() -> None:
    """Told anew it is the same to the letter. Where it has changed on purpose,
    `python -m tests.model.coordinator.transcripts` writes it.
    """
    assert (FOLDER / "restart.md").read_text() == page()

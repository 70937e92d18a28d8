"""The rules of a tree of relays, in a simulation: docs/adr/0012-a-tree-of-relays.md."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from tests.support.simulated_relays import NONE, Mutations, Tree
from tests.support.simulated_world import Violation

FAST = 150
SLOW = 10_000
MOST_TASKS = 64


def lived(seed: int, most_tasks: int, mutations: Mutations = NONE) -> Counter[str]:
    """Lives one job; in every third one a process dies. Returns what happened to its relays."""
    tree = Tree(seed, 4 + seed % (most_tasks - 3), deaths=int(seed % 3 == 0), mutations=mutations)
    tree.run()
    return tree.happened


def test_the_invariants_hold() -> None:
    """Relays die, stand still, are replaced and speak late: in hundreds of jobs each of it
    happens, and every process that lives ends its program.
    """
    happened: Counter[str] = Counter()
    for seed in range(FAST):
        happened += lived(seed, 16)
    assert min(happened[what] for what in ("relay dies", "stall", "replaced", "direct")) > 25


@pytest.mark.slow
@pytest.mark.timeout(300)  # 20 s of CPU, on a machine that may be busy
@pytest.mark.parametrize("part", range(10))
def test_the_invariants_hold_in_ten_thousand_jobs(part: int) -> None:
    """Of 4 to 64 processes."""
    for seed in range(part, SLOW, 10):
        lived(seed, MOST_TASKS)


@pytest.mark.parametrize("name", [each.name for each in fields(Mutations)])
def test_each_defect_is_caught(name: str) -> None:
    """A tree that breaks one rule breaks an invariant within a hundred jobs."""
    mutations = Mutations(**{name: True})
    with pytest.raises(Violation):
        live_many(mutations)


def live_many(mutations: Mutations) -> None:
    for seed in range(100):
        lived(seed, 16, mutations)

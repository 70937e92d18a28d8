"""Each rule that is taken back in the real code is missed: an invariant that has a name is broken,
and the shortest story of it is shown.
"""

from __future__ import annotations

import pytest

from tests.model.promise import Broken

from .configurations import CONFIGURATIONS, Configuration, Searcher
from .mutations import MUTATIONS, Mutation
from .test_interleavings import SLOW, own_searcher

__all__ = ["own_searcher"]

SHORTEST_S = 0.3


def _chosen(mutation: Mutation) -> list[Configuration]:
    """Returns the configurations that may miss it, those in a bucket first."""
    chosen = [each for each in CONFIGURATIONS if mutation.found_in in each.name]
    assert chosen, f"no configuration is called {mutation.found_in}"
    return sorted(chosen, key=lambda each: each.store)


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            each,
            id=each.name,
            # The fast tests take a third: it is the net that is tested here.
            marks=SLOW if at % 3 or all(chosen.is_large for chosen in _chosen(each)) else [],
        )
        for at, each in enumerate(MUTATIONS)
    ],
)
def test_each_rule_is_missed_when_it_goes(own_searcher: Searcher, mutation: Mutation) -> None:
    """One of the configurations that it names comes to an execution that breaks its invariant."""
    with mutation.taken_back():
        for configuration in _chosen(mutation):
            search, violation = own_searcher.search(configuration, shortest_within_s=SHORTEST_S)
            if violation is None:
                continue
            print(own_searcher.story(configuration, search.found, violation))
            assert isinstance(violation, Broken), violation
            assert violation.promise in mutation.breaks
            return
    pytest.fail("no execution noticed")

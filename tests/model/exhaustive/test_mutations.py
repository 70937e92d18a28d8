"""Each rule that is taken back in the real code is missed: an invariant that has a name is broken,
and the shortest story of it is shown.
"""

from __future__ import annotations

import pytest

from .configurations import CONFIGURATIONS, Searcher
from .mutations import MUTATIONS, Mutation
from .rules import Broken
from .test_interleavings import own_searcher

__all__ = ["own_searcher"]

SHORTEST_S = 0.3


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_rule_is_missed_when_it_goes(own_searcher: Searcher, mutation: Mutation) -> None:
    """One of the configurations that it names comes to an execution that breaks its invariant."""
    chosen = [each for each in CONFIGURATIONS if mutation.found_in in each.name]
    assert chosen, f"no configuration is called {mutation.found_in}"
    with mutation.taken_back():
        for configuration in sorted(chosen, key=lambda each: each.store):
            search, violation = own_searcher.search(configuration, shortest_within_s=SHORTEST_S)
            if violation is None:
                continue
            print(own_searcher.story(configuration, search.found, violation))
            assert isinstance(violation, Broken), violation
            assert violation.invariant in mutation.breaks
            return
    pytest.fail("no execution noticed")

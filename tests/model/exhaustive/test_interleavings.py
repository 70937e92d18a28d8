"""Every interleaving of the real save keeps the rules, within the bounds of each configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .__main__ import row
from .configurations import CONFIGURATIONS, Configuration, Searcher, searcher

SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(name="own_searcher")
def own_searcher() -> Iterator[Searcher]:
    """Yields what searches."""
    with searcher() as own:
        yield own


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(each, id=each.name, marks=SLOW if each.is_large else [])
        for each in CONFIGURATIONS
    ],
)
def test_every_interleaving_keeps_the_rules(
    own_searcher: Searcher, configuration: Configuration
) -> None:
    """The search comes to its end, and no invariant is broken. One that is too large fails, and
    says how far it came.
    """
    search, violation = own_searcher.search(configuration)
    print(f"{configuration.name}: {search.told}")
    print(row(configuration, search))
    if violation is not None:
        pytest.fail(own_searcher.story(configuration, search.found, violation))

"""Every order of a sync point's calls keeps its promises; a rule that is taken back breaks one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.promise import Broken

from .mutations import MUTATIONS, Mutation
from .orders import ORDERS, Orders, prepared, search

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    with prepared():
        yield


@pytest.mark.parametrize(
    "orders",
    [pytest.param(each, id=each.name, marks=SLOW if each.is_large else []) for each in ORDERS],
)
def test_every_order_keeps_the_promises(orders: Orders) -> None:
    """The search comes to its end. One that is too large fails, and says how far it came."""
    found, violation, story = search(orders)
    print(f"{orders.name}: {found.told}")
    assert violation is None, f"{story}\n{violation}"
    assert found.executions > 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_rule_that_is_taken_back_is_missed(mutation: Mutation) -> None:
    """The first order that misses it breaks one of the promises named."""
    (orders,) = (each for each in ORDERS if each.name == mutation.found_in)
    with mutation.applied():
        _, violation, story = search(orders)
    assert isinstance(violation, Broken), f"{story}\n{violation}"
    assert violation.promise in mutation.breaks, f"{story}\n{violation}"

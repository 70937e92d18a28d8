"""Which reads are asked a second time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.storage.hedges import (
    CALM_S,
    FEWEST_PEERS,
    PEERS,
    SHARE,
    UNKNOWN_S,
    Hedges,
)
from tests.checkpoint.storage.test_retries import Clock

MIB = 1 << 20


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hedges(clock: Clock) -> Hedges:
    return Hedges(clock.read)


@pytest.mark.parametrize(("took_s", "limit_s"), [(0.1, 1.0), (0.5, 1.0), (3.0, 6.0)])
def test_slow_is_twice_the_tail_of_the_peers(
    hedges: Hedges, clock: Clock, took_s: float, limit_s: float
) -> None:
    """One of twenty that took long is no tail yet; below a second nothing is slow."""
    for number in range(20):
        hedges.note_end(MIB, 30.0 if number == 0 else took_s)
    clock.now = limit_s - 0.01
    assert not hedges.is_slow(MIB, 0.0)
    clock.now = limit_s
    assert hedges.is_slow(MIB, 0.0)
    assert not hedges.is_slow(MIB, 0.01)


def test_peers_have_at_least_half_the_bytes(hedges: Hedges, clock: Clock) -> None:
    """A read is not slow because small ones were fast, nor fast because large ones were slow."""
    for _ in range(FEWEST_PEERS):
        hedges.note_end(1000, 0.01)
    clock.now = 2.0
    assert hedges.is_slow(2000, 0.0)
    assert not hedges.is_slow(2001, 0.0)
    clock.now = UNKNOWN_S
    assert hedges.is_slow(2001, 0.0)


def test_old_peers_are_forgotten(hedges: Hedges, clock: Clock) -> None:
    """A network that has become slow is the normal one after a while."""
    for _ in range(PEERS):
        hedges.note_end(MIB, 0.1)
    for _ in range(PEERS):
        hedges.note_end(MIB, 10.0)
    clock.now = 19.0
    assert not hedges.is_slow(MIB, 0.0)


@given(st.lists(st.booleans(), max_size=400))
def test_few_are_asked_again(begins: list[bool]) -> None:
    """Whatever is slow, second tries are at most one in twenty reads and one more."""
    hedges = Hedges(Clock().read)
    for begins_read in begins:
        if begins_read:
            hedges.note_read()
        elif hedges.may_hedge():
            hedges.note_hedge()
        assert hedges.hedged_reads <= SHARE * hedges.reads + 1


def test_none_is_asked_again_while_the_store_throttles(hedges: Hedges, clock: Clock) -> None:
    """Nor for a while after."""
    assert hedges.may_hedge()
    hedges.note_throttled()
    assert not hedges.may_hedge()
    clock.now = CALM_S - 1
    assert not hedges.may_hedge()
    clock.now = CALM_S
    assert hedges.may_hedge()

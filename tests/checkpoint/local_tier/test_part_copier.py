"""A rate holds, by a clock that the test turns."""

from __future__ import annotations

import math

import pytest

from holdfast.checkpoint.local_tier.part_copier import Throttle


class Clock:
    """Stands still but for who sleeps, and for the test."""

    now = 100.0
    slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


@pytest.mark.parametrize("piece", [1, 1000, 25_000])
def test_so_many_bytes_take_so_long(piece: int) -> None:
    """Whatever their pieces; only the last piece's own time is not waited for."""
    clock = Clock()
    pace = Throttle(1000, clock=clock, sleep=clock.sleep)
    for _ in range(100_000 // piece):
        pace.take(piece)
    assert clock.slept == pytest.approx((100_000 - piece) / 1000)


def test_what_goes_slower_by_itself_is_not_held_up() -> None:
    """And a pause is no credit for what comes after it."""
    clock = Clock()
    pace = Throttle(1000, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        pace.take(500)
        clock.now += 0.5
    assert clock.slept == 0
    clock.now += 3600
    for _ in range(3):
        pace.take(1000)
    assert clock.slept == pytest.approx(2)


def test_without_a_bound_nothing_is_waited_for() -> None:
    """Infinity is a rate too."""
    clock = Clock()
    pace = Throttle(math.inf, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        pace.take(1 << 40)
    assert clock.slept == 0

"""Timers expire what is due and not done, in order of time, and keep no heap of what is over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.core.timers import Timers, Wait


@dataclass
class Recorded:
    """A timer that notes when it expires."""

    when: float
    expired: list[Recorded]
    done: bool = False

    def expire(self, now: float) -> None:
        assert not self.done and now >= self.when
        self.done = True
        self.expired.append(self)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=50),
    st.lists(st.integers(0, 60), max_size=20),
)
def test_timers_expire_in_order(added: list[tuple[int, bool]], times: list[int]) -> None:
    """What is due by then, is not done and is not early has expired, in order of time; `next_due`
    is the earliest of the rest.
    """
    timers = Timers()
    expired = list[Recorded]()
    recorded = [Recorded(float(when), expired) for when, _ in added]
    for timer, (when, done) in zip(recorded, added, strict=True):
        timers.add(float(when), timer)
        timer.done = done
    alive = [timer for timer, (_, done) in zip(recorded, added, strict=True) if not done]
    for now in sorted(times):
        timers.expire(float(now))
        assert sorted(timer.when for timer in alive if timer.when <= now) == [
            timer.when for timer in expired
        ]
        assert timers.next_due() == min(
            (timer.when for timer in alive if timer.when > now), default=math.inf
        )


def test_a_timer_added_late_waits_its_time() -> None:
    """An expiry may add timers; one that is due already expires in the same pass."""
    timers = Timers()
    expired = list[Recorded]()

    class Adding(Recorded):
        def expire(self, now: float) -> None:
            super().expire(now)
            timers.add(1.0, Recorded(1.0, expired))
            timers.add(9.0, Recorded(9.0, expired))

    timers.add(2.0, Adding(2.0, expired))
    timers.expire(2.0)
    assert [timer.when for timer in expired] == [2.0, 1.0] and timers.next_due() == 9.0


def test_never_is_never() -> None:
    """A timer at infinity is not kept."""
    timers = Timers()
    timers.add(math.inf, Recorded(math.inf, []))
    assert timers.next_due() == math.inf


def test_timers_that_are_done_are_swept() -> None:
    """A hundred thousand waits that ended early, one after the other, do not grow the heap."""
    timers = Timers()
    for _ in range(100_000):
        timer = Recorded(1e9, [])
        timers.add(1e9, timer)
        timer.done = True
    assert len(timers._heap) < 5_000


def test_a_wait_asks_its_owner() -> None:
    """`expire` hands the wait to its owner, which knows what to answer."""
    asked = []

    class Owner:
        def time_out(self, wait: Wait, now: float) -> None:
            asked.append((wait.call, now))

    Wait("call", 3, 0.0, Owner()).expire(5.0)
    assert asked == [("call", 5.0)]

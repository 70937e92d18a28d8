"""Timers expire what is due and not done, in order of time, and keep no heap of what is over. A
line of calls answers each of them once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.core.calls import Call, Line, Timers
from holdfast.coordination.core.status import Code, Status


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


class Waits:
    """Calls in a line, and a clock."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.answers: list[Call] = []
        self.left = 0
        self.line = Line(self.timers, self._late, self._left)

    def _late(self, now: float, since: float) -> Status:
        return Status(Code.DEADLINE_EXCEEDED, f"{now - since:g}")

    def _left(self) -> None:
        assert not self.line
        self.left += 1

    def enter(self, deadline: float, came: float = 0.0) -> Call:
        call = Call(self.answers, 0, came, deadline=deadline)
        self.line.enter(call)
        return call


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["wait", "drop", "succeed"]))),
    st.lists(st.integers(0, 40), max_size=20),
)
def test_each_call_ends_once(made: list[tuple[int, str]], times: list[int]) -> None:
    """A call that is dropped is never answered, one that was answered is over; what still waits
    fails at the first look at the clock after its time, however the others in the line ended.
    """
    waits = Waits()
    calls = [(waits.enter(float(deadline)), end) for deadline, end in made]
    for call, end in calls:
        if end == "drop":
            call.drop()
        elif end == "succeed":
            call.succeed(1)
    expected = [call for call, end in calls if end == "succeed"]
    assert waits.answers == expected
    waiting = [call for call, end in calls if end == "wait"]
    for now in sorted(times):
        waits.timers.expire(float(now))
        late = [call for call in waiting if call.deadline <= now]
        assert set(waits.answers[len(expected) :]) == set(late)
        assert len(waits.answers) == len(expected) + len(late)
        assert list(waits.line.values()) == [call for call in waiting if call not in late]
        assert waits.timers.next_due() == math.inf or waits.line


def test_calls_that_are_late_together_share_an_error() -> None:
    """It is one object, which is encoded once, and tells how long the first has waited; the line is
    told once that it is empty.
    """
    waits = Waits()
    first = waits.enter(5.0)
    second = waits.enter(5.0, came=1.0)
    later = waits.enter(6.0)
    waits.timers.expire(5.0)
    assert first.status is second.status and first.status == Status(Code.DEADLINE_EXCEEDED, "5")
    assert not later.done and not waits.left
    waits.timers.expire(6.0)
    assert waits.answers == [first, second, later] and waits.left == 1


def test_a_newer_call_takes_the_olders_place_in_a_line() -> None:
    """The older one fails, and the line never was empty."""
    waits = Waits()
    older, newer = [Call(waits.answers, 3, 0.0) for _ in range(2)]
    waits.line.replace(older)
    waits.line.replace(newer, Code.ALREADY_EXISTS)
    assert older.status == Status(
        Code.ALREADY_EXISTS, "a newer call of process 3 took this one's place"
    )
    assert waits.line == {3: newer} and not waits.left

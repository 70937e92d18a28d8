"""Steps per second, the usual pace, and when a step last changed."""

from __future__ import annotations

from holdfast.coordination.core.step_rate import StepRate


def test_the_rate_is_of_the_last_ten_seconds() -> None:
    """2 steps a second, then 1 in 2 s: the pace follows; the usual one stays the best."""
    rate = StepRate()
    for tenth in range(0, 200, 5):
        rate.note(tenth // 5, tenth / 10)
    assert abs(rate.per_second(19.5) - 2) < 0.01 and abs(rate.usual - 2) < 0.01
    for number in range(10):
        rate.note(40 + number, 20 + 2 * number)
    assert 0.4 < rate.per_second(38) < 0.7 and abs(rate.usual - 2) < 0.01


def test_ten_seconds_without_a_step_are_no_steps_per_second() -> None:
    """Reports of the same step are no progress: the pace sinks to 0, and says since when nothing
    moved.
    """
    rate = StepRate()
    for step in range(41):
        rate.note(step, step / 4)
    for tenth in range(101, 360):
        rate.note(40, tenth / 10)
    assert rate.moved_at == 10.0
    paces = [round(rate.per_second(at), 1) for at in (10.2, 12.0, 15.0, 19.0, 20.0, 35.0)]
    assert paces == [4.0, 3.2, 2.0, 0.4, 0.0, 0.0]


def test_steps_of_half_a_minute_are_slow_and_do_not_stand() -> None:
    """Between two of them there is a pace; after three times as long there is none."""
    rate = StepRate()
    for step in range(4):
        rate.note(step, 30.0 * step)
    assert round(1 / rate.per_second(119.0)) == 30
    assert 0 < rate.per_second(150.0) < 1 / 30
    assert rate.per_second(181.0) == 0


def test_a_process_that_goes_back_begins_anew() -> None:
    """A restart from an earlier step is no negative rate."""
    rate = StepRate()
    rate.note(100, 0.0)
    rate.note(50, 1.0)
    rate.note(52, 2.0)
    assert rate.per_second(2.0) == 2.0


def test_a_loop_that_reports_often_costs_no_memory() -> None:
    """A hundred thousand reports in ten seconds keep a few dozen points."""
    rate = StepRate()
    for step in range(100_000):
        rate.note(step, step / 10_000)
    assert len(rate._points) < 60 and abs(rate.per_second(10.0) - 10_000) < 100

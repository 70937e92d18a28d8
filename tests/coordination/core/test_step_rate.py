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


def test_the_rate_sinks_while_no_step_comes() -> None:
    """Reports of the same step are no progress: the pace goes towards 0, and says since when
    nothing moved.
    """
    rate = StepRate()
    for step in range(10):
        rate.note(step, float(step))
    for second in range(10, 100):
        rate.note(9, float(second))
    assert rate.moved_at == 9.0 and 0 < rate.per_second(99) < 0.11


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

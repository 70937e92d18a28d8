"""A curve that stays bounded and still shows the whole job."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.diagnosis.step_curve import Sample, StepCurve, sample
from holdfast.proto import session_pb2


def test_a_sample_is_of_the_furthest_process() -> None:
    """Steps, saved steps and the pace of the fastest; -1 where nobody has reported."""
    status = session_pb2.StatusResponse()
    assert sample(status, 1.04) == Sample(1.0, -1, 0.0, -1)
    for step in (3, 5):
        task = status.tasks.add(steps_per_second=step / 2)
        task.progress.step = step
    status.tasks[0].progress.saved_step = 2
    assert sample(status, 2.0) == Sample(2.0, 5, 2.5, 2)


@given(waits=st.lists(st.floats(0.1, 1000), max_size=400), most=st.integers(2, 20))
def test_it_stays_bounded_and_shows_the_whole_job(waits: list[float], most: int) -> None:
    """At most so many points and the last one, in order, from the first to the last."""
    curve = StepCurve(most)
    at = 0.0
    added = []
    for number, wait in enumerate(waits):
        at += wait
        added.append(Sample(at, number, 0.0, -1))
        curve.add(added[-1])
        found = curve.samples()
        assert len(found) <= most + 1 and found[0] == added[0] and found[-1] == added[-1]
        assert found == sorted(set(found)) and set(found) <= set(added)


def test_a_day_is_shown_with_its_last_minute() -> None:
    """No hole is longer than a two-hundredth of a job that is sampled evenly."""
    curve = StepCurve(900)
    for second in range(86_400):
        curve.add(Sample(float(second), second, 1.0, -1))
    times = [each.unix_s for each in curve.samples()]
    assert (
        len(times) > 400
        and max(later - earlier for earlier, later in pairwise(times)) < 86_400 / 200
    )

"""Pauses grow and spread."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.client.retry import first_reconnect_s, pauses


def test_pauses_grow_to_a_second() -> None:
    """Each is between half and all of a bound that grows from 20 ms."""
    bound_s = 0.02
    for pause_s in itertools.islice(pauses(), 20):
        assert bound_s / 2 <= pause_s <= bound_s
        bound_s = min(1.0, bound_s * 1.6)


@given(st.integers(1, 100_000), st.floats(1.0, 100.0))
def test_a_large_job_comes_back_spread(num_processes: int, heartbeat_timeout_s: float) -> None:
    """Pauses before the first attempt differ, by a millisecond a process, up to a second and to a
    small part of the heartbeat timeout.
    """
    drawn = [first_reconnect_s(num_processes, heartbeat_timeout_s) for _ in range(50)]
    most = min(num_processes / 1000, 1.0, heartbeat_timeout_s / 20)
    assert all(0 <= pause <= most for pause in drawn) and max(drawn) - min(drawn) > most / 4

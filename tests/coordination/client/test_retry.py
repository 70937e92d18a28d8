"""Pauses grow and spread."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.client.retry import Backoff, first_reconnect_s


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.001, 1.0), st.floats(1.0, 3.0), st.floats(1.0, 5.0))
def test_pauses_grow_to_a_bound(seed: int, first_s: float, factor: float, most_s: float) -> None:
    """Each is between half and all of a bound that grows by the factor, up to the largest; a seed
    repeats them.
    """
    backoff = Backoff(first_s, factor, most_s)
    pauses = list(itertools.islice(backoff.pauses(seed), 20))
    assert pauses == list(itertools.islice(backoff.pauses(seed), 20))
    bound = first_s
    for pause in pauses:
        assert bound / 2 <= pause <= bound
        bound = min(most_s, bound * factor)


@given(st.integers(1, 100_000), st.floats(1.0, 100.0))
def test_a_large_job_comes_back_spread(num_processes: int, heartbeat_timeout_s: float) -> None:
    """Pauses before the first attempt differ, by a millisecond a process, up to a second and to a
    small part of the heartbeat timeout.
    """
    pauses = [first_reconnect_s(num_processes, heartbeat_timeout_s) for _ in range(50)]
    most = min(num_processes / 1000, 1.0, heartbeat_timeout_s / 20)
    assert all(0 <= pause <= most for pause in pauses) and max(pauses) - min(pauses) > most / 4

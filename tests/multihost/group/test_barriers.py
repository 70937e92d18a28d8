"""Barriers in one process: what may be skipped, keys, and what is recorded."""

from __future__ import annotations

import jax
import pytest

import holdfast.multihost as multihost


def test_alone_there_is_nobody_to_wait_for() -> None:
    """In a job of one process every barrier is skipped, whatever the processes are called."""
    for processes in (None, [], [0], {0}):
        assert multihost.should_skip_process_sync(processes)
        multihost.sync_global_processes("alone", timeout=0.01, processes=processes)
        multihost.get_barrier_sync_fn(processes=processes)(key="alone", timeout_ms=10)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "k"),
        ({"prefix": "p"}, "p_k"),
        ({"suffix": "s"}, "k.s"),
        ({"prefix": "p", "suffix": "s"}, "p_k.s"),
    ],
)
def test_a_key_has_its_prefix_and_suffix(options: dict[str, str], key: str) -> None:
    """As Orbax joins them."""
    assert multihost.unique_barrier_key("k", **options) == key


def test_a_skipped_barrier_records_nothing() -> None:
    """Dashboards count waits, not calls: nothing is recorded where nobody is waited for."""
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: events.append(event)
    )
    multihost.sync_global_processes("alone", record_event_name="/test/barrier")
    assert "/test/barrier" not in events


def test_the_default_timeout_is_orbax_s() -> None:
    """Five minutes, in whole seconds."""
    assert multihost.coordination_timeout() == 300

"""The preemption sync point of one process: which sources it has, and what its notices come to."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.multihost import Notice, Polled, Signals, WatchedFile
from holdfast.multihost.preemption import preemption as sync_point
from holdfast.multihost.preemption.preemption import (
    Preemption,
    default_sources,
    merge,
    with_defaults,
)
from tests.support.cluster import run_processes
from tests.support.memory_client import MemoryClient, MemoryCoordinator
from tests.support.paths import program
from tests.support.processes import wait_until


def test_without_jax_distributed_it_speaks_of_this_process() -> None:
    """A lone process gets its own SIGTERM, once, at the next step, and JAX's event is recorded."""
    run_processes(program("preempted_alone"), 1)


def test_notices_merge_to_the_earliest_deadline() -> None:
    """The earliest deadline wins over later ones and over none."""
    early = Notice("a", 10.0)
    late = Notice("b", 20.0)
    open_ended = Notice("c")
    assert merge([open_ended, late, early]) == early
    assert merge([open_ended]) == open_ended
    assert merge([]) is None


def test_the_sources_fit_the_machine() -> None:
    """SIGTERM is always watched, first; Slurm's end time inside a Slurm job."""
    names = [source.name for source in default_sources({"SLURM_JOB_END_TIME": "1800000000"})]
    assert names[:2] == ["SIGTERM", "slurm"]
    assert "slurm" not in [source.name for source in default_sources({})]


def test_sources_that_are_given_come_on_top(tmp_path: Path) -> None:
    """SIGTERM is watched as well, once, and by the source that was given for it."""
    file = WatchedFile(tmp_path / "drain")
    patient = Signals(grace_s=60)
    first, *_, last = with_defaults([file])
    assert first.name == "SIGTERM" and last is file
    sources = with_defaults([patient])
    assert patient in sources and sum(isinstance(each, Signals) for each in sources) == 1
    assert with_defaults([]) == []


def test_a_notice_of_its_own_comes_before_the_launchers_wish_to_grow() -> None:
    """Others hear of that one, for which the process leaves. A wish of another attempt is none."""
    preemption = Preemption([])
    try:
        preemption.grow(MemoryClient(MemoryCoordinator(1), 0))
        assert preemption.notice() is None
        preemption.grow(preemption.client)
        assert preemption.notice() == Notice("growing")
        preemption.notify(Notice("SIGTERM received"))
        assert preemption.notice() == Notice("SIGTERM received")
        preemption.notify(None)
        assert preemption.notice() == Notice("growing")
    finally:
        preemption.close()


def test_who_has_room_for_more_is_not_taken() -> None:
    """All stop, to come back as more, but no machine is lost: the save is planned over all."""
    client = MemoryClient(MemoryCoordinator(1), 0)
    preemption = Preemption([])
    try:
        preemption.join(client, process_id=0, num_processes=1)
        preemption.grow(client)
        steps = itertools.count()
        wait_until(lambda: preemption.reached(next(steps)))
        assert preemption.notice() == Notice("growing") and preemption.noticed() == ()
        preemption.notify(Notice("SIGTERM received"))
        wait_until(lambda: preemption.noticed() == (0,))
    finally:
        preemption.close()


def test_what_is_no_notice_is_refused_and_changes_nothing() -> None:
    """A reason alone would stand, and keep every later notice from the other processes."""
    client = MemoryClient(MemoryCoordinator(1), 0)
    given: Any = "the spot market takes it"
    preemption = Preemption([])
    try:
        preemption.join(client, process_id=0, num_processes=1)
        with pytest.raises(TypeError, match=r"expected a Notice or None, found 'the spot market"):
            preemption.notify(given)
        preemption.add_source(Polled("engine", lambda: given, every_s=0.01))
        preemption.notify(Notice("SIGTERM received"))
        wait_until(lambda: preemption.noticed() == (0,))
        assert preemption.notice() == Notice("SIGTERM received")
    finally:
        preemption.close()


def test_every_attempt_hears_the_same_sources(tmp_path: Path) -> None:
    """Given again, one that runs is not started twice; one that was closed with the sync point,
    since the start failed, is started anew.
    """
    source = WatchedFile(tmp_path / "drain", every_s=0.01)
    try:
        for _ in range(2):
            for _ in range(2):
                running = sync_point.start(None, sources=[source])
            names = [thread.name for thread in threading.enumerate()]
            assert names.count(f"holdfast-notice-{source.name}") == 1
            sync_point.close()
        source.path.touch()
        running = sync_point.start(None, sources=[source])
        wait_until(lambda: running.notice() == Notice(f"{source.path} exists"))
    finally:
        sync_point.stop()

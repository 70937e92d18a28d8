"""ClusterGroup over jaxlib's client and ours, in real processes.

The fast tests hold it in one process, over both kinds of client: tests/multihost/group.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService
from tests.support.cluster import free_port, run_processes
from tests.support.paths import program

BOTH = pytest.mark.parametrize("which", ["jaxlib", "ours"])


def run(which: str, script: Path, count: int = 3) -> list[str]:
    return run_processes(
        script,
        count,
        arguments=[free_port(), which],
    )


@pytest.mark.slow
@BOTH
def test_gather_broadcast_barrier(which: str) -> None:
    """Values come in rank order, the nth call of a name matches the nth, sizes up to 9 MiB pass,
    and no key stays.
    """
    run(
        which,
        program("group_gather_broadcast_barrier"),
    )


@pytest.mark.slow
@BOTH
def test_names_do_not_wait_for_each_other(which: str) -> None:
    """Threads with different names overtake each other; threads with one name take turns."""
    run(
        which,
        program("group_names_do_not_wait"),
    )


@pytest.mark.slow
@BOTH
def test_a_missing_process_is_named_and_fails_late(which: str) -> None:
    """Who waits gets BarrierTimeout with the missing process; the late one gets the same answer;
    the name works again; no key stays.
    """
    outputs = run(
        which,
        program("group_missing_process_named_late"),
    )
    assert "caught (1,)" in outputs[0]
    assert "caught (1,)" in outputs[2]


@pytest.mark.slow
@BOTH
def test_a_group_of_some_processes(which: str) -> None:
    """Ranks follow the processes given; two groups with the same names do not meet."""
    run(
        which,
        program("group_group_some_processes"),
        4,
    )


def test_a_sent_value_counts_though_its_sender_dies() -> None:
    """Rank 0 has every value when a process dies after it sent its own and before all have come;
    the others hear who died.
    """
    body = program("group_value_was_sent_counts")
    with CoordinationService.spawn(
        3, recoverable=True, survivable=True, arguments=("--reconnect-grace-s=1",)
    ) as service:
        port = service.address.rpartition(":")[2]
        outputs = run_processes(body, 3, arguments=[port, "ours"], codes=[0, 0, -9])
    assert "complete" in outputs[0]
    assert "heard of 2" in outputs[1]

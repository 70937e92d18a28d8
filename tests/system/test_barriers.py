"""Barriers: subsets, names used again, threads, who is missing; the same over jaxlib's client and
ours.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, JobIdentity, ServiceTimeouts
from tests.support.cluster import free_port, run_processes
from tests.support.paths import program

# argv: index, count, port of the coordinator, "ours" or "jaxlib", then the test's own.


BOTH = pytest.mark.parametrize("which", [pytest.param("jaxlib", marks=pytest.mark.slow), "ours"])


def run(
    which: str, script: Path, count: int, *arguments: object, timeout_s: float = 90
) -> list[str]:
    return run_processes(
        script, count, arguments=[free_port(), which, *arguments], timeout_s=timeout_s
    )


@BOTH
def test_subsets_and_names_used_again(which: str) -> None:
    """One name serves all processes and two disjoint subsets at once, again and again; a function
    made once serves many keys.
    """
    run(
        which,
        program("barriers_subsets_names_used_again"),
        4,
    )


@BOTH
def test_the_missing_are_named(which: str) -> None:
    """A barrier that one process reaches too late fails in time naming it, fails alike for the late
    one, and serves again after.
    """
    outputs = run(
        which,
        program("barriers_missing_named_name_still"),
        3,
    )
    for index in (0, 1):
        assert "missing (2,) name epoch in time True DEADLINE_EXCEEDED: " in outputs[index]
        assert which == "jaxlib" or "; process 2 last reported step 42" in outputs[index], outputs[
            index
        ]


@pytest.mark.slow
@BOTH
def test_threads_of_one_name_take_turns(which: str) -> None:
    """Eight threads that use one name at once do not disturb each other: as many calls as there are
    end.
    """
    run(
        which,
        program("barriers_threads_one_name_take"),
        3,
    )


CONCURRENT = program("barriers_concurrent")


def run_concurrent(which: str, rounds: int, folder: Path, timeout_s: float) -> int:
    """50 names, 8 processes: who leaves a barrier has seen that all its participants entered it,
    and none is more than one turn ahead.

    Returns by how many bytes our service grew after the first tenth of the rounds.
    """
    board = folder / "seen"
    board.write_bytes(bytes(50 * 8 * 4))
    if which == "jaxlib":
        run(which, CONCURRENT, 8, rounds, board, 0, timeout_s=timeout_s)
        return 0
    with CoordinationService.spawn(
        8,
        job=JobIdentity(name="job"),
        timeouts=ServiceTimeouts(heartbeat_s=30),
        recoverable=True,
        survivable=True,
    ) as service:
        arguments = [service.address.rpartition(":")[2], which, rounds, board, service.pid]
        # The timeout of lost processes is the service's own.
        outputs = run_processes(
            CONCURRENT, 8, arguments=arguments, timeout_s=timeout_s, env={"TEST_HEARTBEAT_S": ""}
        )
    return int(re.search(r"grew by (-?\d+) bytes", outputs[0])[1])  # type: ignore[index]


@pytest.mark.slow
@BOTH
def test_fifty_names_from_ten_threads(which: str, tmp_path: Path) -> None:
    """50 named barriers from 10 threads on 8 processes, over all and over subsets: no turn of any
    name is mixed up.
    """
    run_concurrent(which, 5, tmp_path, 100)


ROUNDS = int(os.environ.get("BARRIER_ROUNDS", "250"))  # a whole campaign has 1,000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_names_for_many_rounds(tmp_path: Path) -> None:
    """The same for many rounds over our service, which holds on to nothing: after the first tenth
    of the barriers it has hardly grown.
    """
    grown = run_concurrent("ours", ROUNDS, tmp_path, 850)
    print(f"the service grew by {grown} bytes")
    assert grown < ROUNDS << 12  # 50 barriers a round


def test_numbers_of_no_process_are_refused() -> None:
    """A process that the job does not have is a ValueError that says which it has; a timeout of 0
    does not wait for anybody.
    """
    run_processes(
        program("barriers_numbers_no_process_refused"),
        2,
        arguments=[free_port()],
    )

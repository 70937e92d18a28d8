"""global_max and broadcast_one_to_all: exact, for any tree, and an error instead of a hang when a
peer dies.
"""

from __future__ import annotations

import time

import pytest

from tests.support.cluster import Processes, free_port, run_processes
from tests.support.paths import program

# argv: index, count, port of the coordinator, then the test's own.


def test_exact_for_every_dtype() -> None:
    """The source's bits arrive, whoever it is: 64-bit values, -0.0, NaN payloads, bfloat16,
    booleans, complex numbers, typed keys.
    """
    run_processes(
        program("collectives_exact_for_every_dtype"),
        3,
        arguments=[free_port()],
        devices=2,
    )


@pytest.mark.slow
def test_calls_that_do_not_match() -> None:
    """Other trees, shapes, dtypes of equal size, sources, lengths, calls: all processes raise the
    same before the devices compute, and the next call works. One that is not made is named in time.
    """
    outputs = run_processes(
        program("collectives_that_do_not_match"), 3, arguments=[free_port()], devices=1
    )
    assert all("all raised" in output for output in outputs), outputs


SLOW = ("blocking get", "gather", "broadcast", "global_max")


@pytest.mark.parametrize(
    "during", ["barrier", *(pytest.param(during, marks=pytest.mark.slow) for during in SLOW)]
)
def test_killed_in_the_middle(during: str) -> None:
    """SIGKILL of one of four while the others wait: every survivor gets an error naming it within
    the heartbeat timeout (4 s) and 2 s.
    """
    victim = 0 if during == "blocking get" else 3
    script = program("collectives_killed")
    with Processes(script, 4, arguments=[free_port(), victim, during]) as processes:
        for index in range(4):
            processes.wait_for(index, "ready")
        time.sleep(0.5)  # long enough for the others to be in the middle of it; any moment will do
        killed_at = time.time()
        processes.kill(victim)
        finished = processes.wait(60)
    for index in set(range(4)) - {victim}:
        assert finished[index].code == 0, finished[index]
        line = next(line for line in finished[index].output.splitlines() if line.startswith("lost"))
        assert line.startswith(f"lost {victim} at "), line
        took_s = float(line.split()[3]) - killed_at
        print(f"{during}: process {index} heard after {took_s:.2f} s")


@pytest.mark.slow
def test_a_peer_that_never_calls_is_a_timeout() -> None:
    """When a live process does not take part, the others get BarrierTimeout in time."""
    outputs = run_processes(
        program("collectives_peer_does_not_call"),
        3,
        arguments=[free_port()],
    )
    assert all(
        "late: DEADLINE_EXCEEDED: global_max did not begin in 1.5 s: process 0 did not call it"
        in output
        for output in outputs[1:]
    ), outputs

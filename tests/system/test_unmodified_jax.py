"""The service under unmodified jax programs of several processes."""

from __future__ import annotations

import signal

import pytest

from holdfast.coordination import CoordinationService, ServiceTimeouts
from tests.support.cluster import Processes, run_processes
from tests.support.jax_program import BIND, JAX_PROGRAM, preempted_at
from tests.support.paths import program


def test_an_unmodified_jax_program_runs_on_four_processes() -> None:
    """Devices, syncs, broadcast, all-gather, live_devices, the SIGTERM sync point and shutdown;
    then the coordinator ends by itself.
    """
    with CoordinationService.spawn(4) as service:
        outputs = run_processes(JAX_PROGRAM, 4, arguments=[service.address], env=BIND)
        assert len(preempted_at(outputs)) == 1, outputs
        assert service.wait(20) == 0


@pytest.mark.slow
def test_a_job_is_started_again_as_a_whole() -> None:
    """Where nobody has told of its end: who comes waits until the former processes are lost, and
    finds nothing of theirs.
    """
    lives = program("unmodified_jax_lives")
    with CoordinationService.spawn(2, recoverable=True) as service:
        with Processes(lives, 2, arguments=[service.address, "first"], env=BIND) as first:
            for index in range(2):
                first.wait_for(index, "left a key")
            for index in range(2):
                first.kill(index)
        outputs = run_processes(lives, 2, arguments=[service.address, "second"], env=BIND)
    assert all("found []" in output and "together" in output for output in outputs), outputs


SURVIVOR = program("unmodified_jax_survivor")


@pytest.mark.slow
def test_others_go_on_when_process_0_is_killed() -> None:
    """With --recoverable, SIGKILL of process 0 of an unmodified jax job: the others hear who is
    lost and go on.
    """
    with CoordinationService.spawn(
        4, timeouts=ServiceTimeouts(heartbeat_s=6), recoverable=True
    ) as service:
        with Processes(SURVIVOR, 4, arguments=[service.address], env=BIND) as processes:
            for index in range(4):
                processes.wait_for(index, "together")
            processes.kill(0)
            finished = processes.wait(60)
    assert [each.code for each in finished] == [-signal.SIGKILL, 0, 0, 0], [
        each.output for each in finished
    ]
    for each in finished[1:]:
        assert (
            "it can never be passed: process 0 (silent for" in each.output
            and "went on" in each.output
        )


HELD_INTERPRETER = program("unmodified_jax_held")


@pytest.mark.slow
def test_the_agent_speaks_for_a_process_whose_interpreter_is_held() -> None:
    """A call of C that holds Python's lock for three heartbeat timeouts: the process is not lost,
    since jaxlib's agent in it goes on beating.
    """
    timeouts = ServiceTimeouts(heartbeat_s=3)
    with CoordinationService.spawn(1, timeouts=timeouts, recoverable=True) as service:
        run_processes(HELD_INTERPRETER, 1, arguments=[service.address], env=BIND)

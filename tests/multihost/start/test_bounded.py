"""The start of jax ends in time, by name, whoever dies or dawdles before the backend is up."""

from __future__ import annotations

import signal

import pytest

from holdfast.coordination import CoordinationService, ServiceTimeouts
from tests.support.cluster import free_port, run_processes
from tests.support.paths import program

PROGRAM = program("late_backend")


def test_a_death_before_the_backend_is_named() -> None:
    """Killed after it had joined, and long before its heartbeat timeout: the others' initialize()
    ends in its time with ProcessLost.
    """
    with CoordinationService.spawn(
        3,
        timeouts=ServiceTimeouts(heartbeat_s=60),
        recoverable=True,
        survivable=True,
        arguments=("--reconnect-grace-s=1",),
    ) as service:
        outputs = run_processes(
            PROGRAM, 3, arguments=[service.address, 8, "dies"], codes=[0, -signal.SIGKILL, 0]
        )
    for index in (0, 2):
        assert "ended ProcessLost 1 in time True" in outputs[index], outputs[index]


def test_a_failure_before_the_backend_ends_all() -> None:
    """Its error is reported, and the others do not wait for the end of their own time."""
    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=60), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(PROGRAM, 2, arguments=[service.address, 60, "fails"], codes=[0, 1])
    assert "ended ProcessLost 1 in time True" in outputs[0], outputs[0]
    assert "no accelerator" in outputs[0], outputs[0]


@pytest.mark.slow
def test_who_dawdles_before_the_backend_is_named() -> None:
    """It lives and has not begun to start jax: StartupTimeout with its number."""
    outputs = run_processes(PROGRAM, 2, arguments=[f"127.0.0.1:{free_port()}", 6, "dawdles"])
    assert "ended StartupTimeout (1,) in time True" in outputs[0], outputs
    assert (
        "jax did not start in 6 s: all have joined the job, and it waits for process 1"
        in outputs[0]
    )

"""Ordinary jax jobs reach a secured coordinator through relays."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, JobIdentity, ServiceTimeouts
from holdfast.multihost import ProcessSpec
from tests.support.cluster import run_processes
from tests.support.jax_program import BIND, preempted_at
from tests.support.paths import program
from tests.support.secured import secure

JAX_JOB = program("relays_jax_job")


@pytest.mark.slow
def test_an_ordinary_jax_job_runs_through_relays(tmp_path: Path) -> None:
    """Four jax processes, each with its relay and our own client beside jaxlib's agent, run the
    full path against mTLS and token.
    """
    security = secure(tmp_path)
    own = security.own
    with CoordinationService.spawn(
        4,
        timeouts=ServiceTimeouts(heartbeat_s=60),
        recoverable=True,
        survivable=True,
        arguments=security.arguments,
    ) as service:
        arguments = [service.address, own.token_file, own.tls_cert, own.tls_key, own.tls_ca]
        outputs = run_processes(JAX_JOB, 4, arguments=arguments, timeout_s=100)
    assert all("done" in output for output in outputs)


@pytest.mark.slow
def test_the_full_jax_path_runs_through_relays(tmp_path: Path) -> None:
    """Four processes of jax that know of nothing but an address: devices, collectives,
    live_devices, the SIGTERM sync point, shutdown.
    """
    security = secure(tmp_path)
    own = security.own
    relayed = program("relays_full_jax_path")
    with CoordinationService.spawn(4, arguments=security.arguments) as service:
        arguments = [service.address, own.token_file, own.tls_cert, own.tls_key, own.tls_ca]
        outputs = run_processes(
            relayed,
            4,
            arguments=arguments,
            env=BIND,
            timeout_s=100,
        )
        assert len(preempted_at(outputs)) == 1, outputs
        assert service.wait(20) == 0


INITIALIZED = program("relays_initialized")


@pytest.mark.parametrize(
    "token",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["mTLS and token", "mTLS alone"],
)
def test_initialize_joins_a_secured_coordinator(token: bool, tmp_path: Path) -> None:
    """`multihost.initialize()` takes certificate and token from its spec, and a real
    jax.distributed job of 4 processes runs.
    """
    security = secure(tmp_path)
    own = security.own
    arguments = security.arguments if token else security.arguments[:3]
    with CoordinationService.spawn(
        4,
        job=JobIdentity(name="j", attempt=1),
        recoverable=True,
        survivable=True,
        arguments=arguments,
    ) as service:

        def env(index: int) -> dict[str, str]:
            spec = ProcessSpec(
                process_id=index,
                num_processes=4,
                coordinator=service.address,
                job_id="j",
                attempt=1,
                token_file=own.token_file if token else None,
                tls_cert=own.tls_cert,
                tls_key=own.tls_key,
                tls_ca=own.tls_ca,
            )
            return spec.to_env()

        outputs = run_processes(INITIALIZED, 4, env_of=env, timeout_s=100)
        assert all("done" in output for output in outputs)
        assert service.wait(20) == 0

"""Ordinary jax jobs reach a secured coordinator through relays."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, JobIdentity, ServiceTimeouts
from holdfast.multihost import ProcessSpec
from tests.support.cluster import run_processes
from tests.support.jax_program import BIND, JAX_PROGRAM, preempted_at
from tests.support.secured import secure

JAX_JOB = """
    import os, sys
    index, count, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    from holdfast.coordination import CoordinationClient, Credentials, JobIdentity, Relay, Timeouts
    credentials = Credentials(*sys.argv[4:])
    with Relay.spawn(coordinator, credentials, [index]) as relay, \\
            CoordinationClient(coordinator, index, job=JobIdentity(num_processes=count), timeouts=Timeouts(init_s=60), credentials=credentials) as client:
        import jax, numpy as np
        from jax.experimental import multihost_utils
        jax.distributed.initialize(relay.address, count, index, coordinator_bind_address="127.0.0.1:0", heartbeat_timeout_seconds=86400)
        assert jax.process_count() == count and jax.device_count() == count
        multihost_utils.sync_global_devices("here")
        assert multihost_utils.broadcast_one_to_all(np.int32(7 + index)) == 7
        assert multihost_utils.process_allgather(np.int32([index])).ravel().tolist() == list(range(count))
        client.wait_at_barrier("holdfast/own", 30_000)
        client.key_value_set(f"holdfast/{index}", "x")
        theirs = jax._src.distributed.global_state.client
        client.wait_at_barrier("holdfast/set", 30_000)
        assert len(theirs.key_value_dir_get("holdfast")) == count
        jax.distributed.shutdown()
    print("done", flush=True)
"""


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


def test_the_full_jax_path_runs_through_relays(tmp_path: Path) -> None:
    """Four processes of jax that know of nothing but an address: devices, collectives,
    live_devices, the SIGTERM sync point, shutdown.
    """
    security = secure(tmp_path)
    own = security.own
    relayed = """
import sys
from holdfast.coordination import Credentials, Relay
relay = Relay.spawn(sys.argv[3], Credentials(*sys.argv[4:]), [int(sys.argv[1])])
sys.argv[3:] = [relay.address]
"""
    with CoordinationService.spawn(4, arguments=security.arguments) as service:
        arguments = [service.address, own.token_file, own.tls_cert, own.tls_key, own.tls_ca]
        outputs = run_processes(
            relayed + JAX_PROGRAM + "relay.close()\n",
            4,
            arguments=arguments,
            env=BIND,
            timeout_s=100,
        )
        assert len(preempted_at(outputs)) == 1, outputs
        assert service.wait(20) == 0


INITIALIZED = """
    import sys
    import jax, numpy as np
    from jax.experimental import multihost_utils
    from holdfast import multihost
    index, count = int(sys.argv[1]), int(sys.argv[2])
    multihost.initialize(timeout_s=60)
    assert jax.process_count() == count and jax.device_count() == count
    multihost_utils.sync_global_devices("device collective")
    assert multihost_utils.broadcast_one_to_all(np.int32(7 + index)) == 7
    assert multihost_utils.process_allgather(np.int32([index])).ravel().tolist() == list(range(count))
    assert multihost.global_max([index, -index]) == [count - 1, 0]
    multihost.sync_global_processes("all", timeout=30)
    multihost.shutdown()
    print("done", flush=True)
"""


@pytest.mark.parametrize("token", [True, False], ids=["mTLS and token", "mTLS alone"])
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

"""The coordinator of a job that no launcher started: who starts it, who joins it, and one of an
earlier start.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationClient, CoordinationService, JobIdentity, Timeouts
from holdfast.multihost import ProcessSpec, StartupFailed
from holdfast.multihost.group.group_client import Deadline
from holdfast.multihost.start.coordinator import find_coordinator, phase_at
from tests.support.cluster import free_port


def spec_at(address: str, process: int, num_processes: int = 2) -> ProcessSpec:
    return ProcessSpec(
        process_id=process, num_processes=num_processes, coordinator=address, job_id=""
    )


def connected(address: str, num_processes: int) -> list[CoordinationClient]:
    """Returns a client of each process, after all have joined."""
    clients = [
        CoordinationClient(
            address,
            task,
            job=JobIdentity(num_processes=num_processes),
            timeouts=Timeouts(shutdown_s=5),
        )
        for task in range(num_processes)
    ]
    with ThreadPoolExecutor(num_processes) as pool:
        list(pool.map(lambda client: client.connect(), clients))
    return clients


def leave(clients: list[CoordinationClient]) -> None:
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(lambda client: client.shutdown(), clients))
    for client in clients:
        client.close()


def test_nobody_at_an_address_has_no_phase() -> None:
    """A port where nobody listens is None."""
    assert phase_at(f"127.0.0.1:{free_port()}") is None


def test_only_process_0_starts_a_coordinator() -> None:
    """Process 1 returns without starting any: it waits for process 0's when it connects. Process
    0's gathers the job's processes.
    """
    address = f"127.0.0.1:{free_port()}"
    find_coordinator(spec_at(address, 1), Deadline(5.0), 10.0)
    assert phase_at(address) is None
    find_coordinator(spec_at(address, 0), Deadline(30.0), 10.0)
    assert phase_at(address) == "gathering"
    leave(connected(address, 2))  # it ends by itself


def test_one_that_gathers_is_joined() -> None:
    """A coordinator that somebody has started already is taken as it is, by process 0 too."""
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        find_coordinator(spec_at(service.address, 0), Deadline(5.0), 10.0)
        assert phase_at(service.address) == "gathering"


def test_process_0_starts_one_at_a_socket_too(tmp_path: Path) -> None:
    """An address unix:PATH is listened at as it is."""
    address = f"unix:{tmp_path}/c"
    find_coordinator(spec_at(address, 0), Deadline(60), 5)
    assert phase_at(address) == "gathering"
    leave(connected(address, 2))


def test_one_of_an_earlier_start_is_named() -> None:
    """A coordinator that has had all its processes is not joined: StartupFailed says what it is and
    what to do, with the timeout.
    """
    with CoordinationService.spawn(1, recoverable=True, survivable=True) as service:
        with CoordinationClient(
            service.address, 0, job=JobIdentity(num_processes=1), timeouts=Timeouts(shutdown_s=2)
        ) as client:
            assert phase_at(service.address) == "running"
            message = "is running: it belongs to an earlier start; let it end, or take another port"
            with pytest.raises(StartupFailed, match=message) as caught:
                find_coordinator(spec_at(service.address, 0, 1), Deadline(0.1), 10.0)
            assert (caught.value.timeout_s, caught.value.knob) == (0.1, "timeout_s")
            client.close()

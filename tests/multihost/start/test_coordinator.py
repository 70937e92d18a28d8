"""The coordinator of a job that no launcher started: who starts it, who joins it, and one of an
earlier start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    JobIdentity,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.multihost import ProcessSpec, StartupFailed
from holdfast.multihost.group.group_client import Deadline
from holdfast.multihost.ray_train import RayTrainWorker
from holdfast.multihost.start import coordinator
from holdfast.multihost.start.coordinator import find_coordinator, status_at
from tests.support.cluster import free_port


def spec_at(address: str, process: int, num_processes: int = 2) -> ProcessSpec:
    return ProcessSpec(
        process_id=process, num_processes=num_processes, coordinator=address, job_id=""
    )


def phase_at(address: str) -> str:
    status = status_at(address)
    assert status is not None
    return status.phase


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
    assert status_at(f"127.0.0.1:{free_port()}") is None


def test_only_process_0_starts_a_coordinator() -> None:
    """Process 1 returns without starting any: it waits for process 0's when it connects. Process
    0's gathers the job's processes.
    """
    address = f"127.0.0.1:{free_port()}"
    find_coordinator(spec_at(address, 1), Deadline(5.0), 10.0)
    assert status_at(address) is None
    find_coordinator(spec_at(address, 0), Deadline(30.0), 10.0)
    assert phase_at(address) == "gathering"
    leave(connected(address, 2))  # it ends by itself


def test_a_worker_of_ray_train_may_have_an_ipv6_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives its bare address. Ray's own channel to the other workers is left out here."""
    monkeypatch.setattr(coordinator, "count_attempt", lambda run_id: 3)
    monkeypatch.setattr(coordinator, "broadcast", lambda told, timeout_s: told)
    worker = RayTrainWorker(
        run_id="r", rank=0, num_workers=1, local_rank=0, local_count=1, num_slices=1, host="::1"
    )
    spec = coordinator.gather_workers(worker, Deadline(30.0), 10.0)
    assert spec.coordinator.startswith("[::1]:") and spec.attempt == 3
    assert phase_at(spec.coordinator) == "gathering"
    leave(connected(spec.coordinator, 1))


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
            message = (
                r"is running: it belongs to an earlier start \(.*\); let it end, or take another"
            )
            with pytest.raises(StartupFailed, match=message) as caught:
                find_coordinator(spec_at(service.address, 0, 1), Deadline(0.1), 10.0)
            assert (caught.value.timeout_s, caught.value.knob) == (0.1, "timeout_s")
            client.close()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_GRACE_S", 0.5)


@pytest.fixture
def one_of_two(short_grace: None) -> Iterator[tuple[str, CoordinationClient]]:
    """The address of a job "a", which has two processes, and its process 0, which waits."""
    with (
        CoordinationService.spawn(
            2,
            job=JobIdentity(name="a"),
            timeouts=ServiceTimeouts(heartbeat_s=3),
            recoverable=True,
            survivable=True,
        ) as service,
        ThreadPoolExecutor(1) as pool,
    ):
        first = CoordinationClient(
            service.address, 0, job=JobIdentity("a", 0, 2), timeouts=Timeouts(init_s=30)
        )
        joining = pool.submit(first.connect)
        while not any(task.has_session for task in status_at(service.address).tasks):
            time.sleep(0.01)
        yield service.address, first
        first.close()
        with contextlib.suppress(CoordinationError):
            joining.result(30)


@pytest.mark.parametrize(("job", "process"), [("a", 0), ("b", 0), ("b", 1)])
def test_jobs_side_by_side_do_not_mix(
    one_of_two: tuple[str, CoordinationClient], job: str, process: int
) -> None:
    """Process 0 of a job is not process 0 of another that lives at the address, and no process
    joins a job of another name: StartupFailed has both names, and what to do.
    """
    address, _ = one_of_two
    me = replace(spec_at(address, process), job_id=job, attempt=2 if job == "b" else 0)
    with pytest.raises(StartupFailed) as caught:
        find_coordinator(me, Deadline(60), 3)
    text = str(caught.value)
    assert "is that of job 'a', attempt 0, of 2 processes, whose process 0 lives (host " in text
    assert f"pid {os.getpid()}); this is process {process} of job '{job}', attempt" in text
    assert "give each job an address of its own" in text


def test_a_place_that_is_free_again_is_taken(
    one_of_two: tuple[str, CoordinationClient],
) -> None:
    """A process whose former life ends while it waits joins, as in a container that is started
    again; another process of the job does not wait at all.
    """
    address, first = one_of_two
    find_coordinator(replace(spec_at(address, 1), job_id="a"), Deadline(0.1), 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            find_coordinator, replace(spec_at(address, 0), job_id="a"), Deadline(60), 3
        )
        first.close()
        waiting.result(30)

"""The coordinator of a job that no launcher of ours started: process 0 starts it, and nobody joins
one of an earlier start.

Workers of Ray Train learn its address, and which attempt they are, from rank 0 by Ray's own
channel.
"""

from __future__ import annotations

import logging
import time

from holdfast.coordination import (
    CoordinationError,
    CoordinationService,
    Endpoint,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
)

from ..errors import StartupFailed, StartupTimeout
from ..group.group_client import Deadline
from ..ray_train import RayTrainWorker, broadcast, count_attempt
from ..spec import ProcessSpec

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_STATUS_TIMEOUT_S = 2.0
# How soon a coordinator whose processes have all died ends: the next start of the program wants its
# address.
_LINGER_S = 2.0
_HEARTBEAT_TIMEOUT_S = 100.0
_started: list[CoordinationService] = []  # they end by themselves, after all have left


def find_coordinator(
    spec: ProcessSpec, deadline: Deadline, heartbeat_timeout_s: float | None
) -> None:
    """Returns when a coordinator that has not yet had all its processes can be joined at the
    address; process 0 starts it.

    One that has had them is of an earlier start, whose processes died without leaving: waits until
    it ends. Raises StartupFailed when it does not, CoordinationError when the address cannot be
    bound.
    """
    waited = False
    while (phase := phase_at(spec.coordinator)) not in (None, "", "gathering"):
        if not deadline.remaining_s():
            raise StartupFailed(
                f"the coordinator at {spec.coordinator} is {phase}: it belongs to an earlier start;"
                " let it end, or take another port",
                elapsed_s=deadline.elapsed_s(),
                timeout_s=deadline.timeout_s,
                knob="timeout_s",
            )
        if not waited:
            _log.warning(
                "the coordinator at %s belongs to an earlier start; waiting for it to end",
                spec.coordinator,
            )
            waited = True
        time.sleep(min(_POLL_S, deadline.remaining_s()))
    if phase is None and spec.process_id == 0:
        host, _, port = (
            spec.coordinator.rpartition(":")
            if not spec.coordinator.startswith("unix:")
            else (spec.coordinator, "", "0")
        )
        _start(
            host.strip("[]"),
            int(port),
            spec.num_processes,
            spec.job_id,
            spec.attempt,
            heartbeat_timeout_s,
        )


def phase_at(address: str) -> str | None:
    """Returns how far the job at an address is ("gathering", "running", "ending"), "" where it does
    not say, None where nobody answers.
    """
    try:
        with StatusClient(address, timeout_s=_STATUS_TIMEOUT_S) as client:
            return client.status().phase
    except CoordinationError as error:
        return None if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else ""


def gather_workers(
    worker: RayTrainWorker, deadline: Deadline, heartbeat_timeout_s: float | None
) -> ProcessSpec:
    """Returns who a worker of Ray Train is, once all have come; rank 0 starts the coordinator on
    its node. Raises StartupTimeout.
    """
    started: tuple[str, int] | None = None
    if worker.rank == 0:
        attempt = count_attempt(worker.run_id)
        started = (
            _start(worker.host, 0, worker.num_workers, worker.run_id, attempt, heartbeat_timeout_s),
            attempt,
        )
    try:
        address, attempt = broadcast(started, deadline.remaining_s())
    except TimeoutError as error:
        raise StartupTimeout(
            f"the {worker.num_workers} workers of Ray Train have not all called initialize() in"
            f" {deadline.timeout_s:g} s; each has to, before it computes anything",
            elapsed_s=deadline.elapsed_s(),
            timeout_s=deadline.timeout_s,
            knob="timeout_s",
        ) from error
    return ProcessSpec(
        process_id=worker.rank,
        num_processes=worker.num_workers,
        coordinator=address,
        job_id=worker.run_id,
        attempt=attempt,
        slice_id=worker.rank * worker.num_slices // worker.num_workers,
        num_slices=worker.num_slices,
        local_rank=worker.local_rank,
    )


def _start(
    host: str,
    port: int,
    num_processes: int,
    job_id: str,
    attempt: int,
    heartbeat_timeout_s: float | None,
) -> str:
    """Starts a coordinator and returns its address."""
    service = CoordinationService.spawn(
        num_processes,
        job=JobIdentity(name=job_id, attempt=attempt),
        endpoint=Endpoint(host=host, port=port),
        timeouts=ServiceTimeouts(
            heartbeat_s=heartbeat_timeout_s or _HEARTBEAT_TIMEOUT_S, linger_s=_LINGER_S
        ),
        recoverable=True,
        survivable=True,
    )
    _started.append(service)
    return service.address

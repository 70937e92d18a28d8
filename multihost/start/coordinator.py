"""The coordinator of a job that no launcher of ours started.

Process 0 starts it, and nobody joins one of an earlier start. Workers of Ray Train learn its
address, and which attempt they are, from rank 0 by Ray's own channel.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from holdfast.coordination import (
    CoordinationError,
    CoordinationService,
    Endpoint,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.coordination.address import UNIX, split_address

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
# Nobody listens; somebody who does not say how far the job is; one that waits for its processes.
_JOINABLE = (None, "", "gathering")
# They end by themselves, after all have left.
_started: list[CoordinationService] = []


def find_coordinator(
    spec: ProcessSpec, deadline: Deadline, heartbeat_timeout_s: float | None
) -> None:
    """Returns when a coordinator can be joined at the address; process 0 starts it.

    A coordinator can be joined that has not yet had all its processes. One that has had them is of
    an earlier start, whose processes died without leaving: waits until it ends. Raises
    StartupFailed when it does not, CoordinationError when the address cannot be bound.
    """
    phase = phase_at(spec.coordinator)
    if phase not in _JOINABLE:
        _log.warning(
            "the coordinator at %s belongs to an earlier start; waiting for it to end",
            spec.coordinator,
        )
    while phase not in _JOINABLE:
        if not deadline.remaining_s():
            raise StartupFailed(
                f"the coordinator at {spec.coordinator} is {phase}: it belongs to an earlier start;"
                " let it end, or take another port",
                elapsed_s=deadline.elapsed_s(),
                timeout_s=deadline.timeout_s,
                knob="timeout_s",
            )
        time.sleep(min(_POLL_S, deadline.remaining_s()))
        phase = phase_at(spec.coordinator)
    if phase is None and spec.process_id == 0:
        _start(spec, _endpoint(spec.coordinator), heartbeat_timeout_s)


def phase_at(address: str) -> str | None:
    """Returns how far the job at an address is: "gathering", "running" or "ending".

    "" where it does not say, None where nobody answers.
    """
    try:
        with StatusClient(address, timeout_s=_STATUS_TIMEOUT_S) as client:
            return client.status().phase
    except CoordinationError as error:
        return None if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else ""


def gather_workers(
    worker: RayTrainWorker, deadline: Deadline, heartbeat_timeout_s: float | None
) -> ProcessSpec:
    """Returns who a worker of Ray Train is, once all have come. Raises StartupTimeout.

    Rank 0 starts the coordinator on its node.
    """
    spec = ProcessSpec(
        process_id=worker.rank,
        num_processes=worker.num_workers,
        coordinator=f"{worker.host}:1",  # until rank 0 has told
        job_id=worker.run_id,
        slice_id=worker.rank * worker.num_slices // worker.num_workers,
        num_slices=worker.num_slices,
        local_rank=worker.local_rank,
        local_count=worker.local_count,
    )
    started: tuple[str, int] | None = None
    if worker.rank == 0:
        spec = replace(spec, attempt=count_attempt(worker.run_id))
        started = (_start(spec, Endpoint(worker.host), heartbeat_timeout_s), spec.attempt)
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
    return replace(spec, coordinator=address, attempt=attempt)


def _endpoint(address: str) -> Endpoint:
    return Endpoint(address) if address.startswith(UNIX) else Endpoint(*split_address(address))


def _start(spec: ProcessSpec, endpoint: Endpoint, heartbeat_timeout_s: float | None) -> str:
    """Starts the coordinator of a job and returns its address."""
    service = CoordinationService.spawn(
        spec.num_processes,
        job=JobIdentity(name=spec.job_id, attempt=spec.attempt),
        endpoint=endpoint,
        timeouts=ServiceTimeouts(
            heartbeat_s=heartbeat_timeout_s or _HEARTBEAT_TIMEOUT_S, linger_s=_LINGER_S
        ),
        recoverable=True,
        survivable=True,
    )
    _started.append(service)
    return service.address

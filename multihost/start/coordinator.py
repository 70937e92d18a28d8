"""The coordinator of a job that no launcher of ours started.

Process 0 starts it, and nobody joins one of an earlier start, or of another job. Workers of Ray
Train learn its address, and which attempt they are, from rank 0 by Ray's own channel.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from holdfast.coordination import (
    CoordinationError,
    CoordinationService,
    Endpoint,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.coordination.address import UNIX, join_address, split_address
from holdfast.coordination.diagnosis.summary import counted
from holdfast.coordination.limits import HEARTBEATS_PER_TIMEOUT
from holdfast.proto.coordination_pb2 import CONNECTED
from holdfast.proto.session_pb2 import StatusResponse, TaskStatus

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
# Somebody who does not say how far the job is; one that waits for its processes.
_JOINABLE = ("", "gathering")
# A process that is heard of so long after another has come to its place is not about to be gone: a
# launcher starts a process again as soon as it sees the first one end.
_GRACE_S = 5.0
_SAID_NOTHING = StatusResponse()
# They end by themselves, after all have left.
_started: list[CoordinationService] = []


def find_coordinator(
    spec: ProcessSpec, deadline: Deadline, heartbeat_timeout_s: float | None
) -> None:
    """Returns when a coordinator can be joined at the address; process 0 starts it.

    A coordinator of this job can be joined that has not yet had all its processes, and where this
    process's place is free. Else it is of an earlier start, whose processes died without leaving:
    waits until it ends, and for a process that has this one's place as long as that may live, the
    heartbeat timeout. Raises StartupFailed where it does not end, and as soon as it is known that
    the two jobs live side by side; CoordinationError when the address cannot be bound.
    """
    waited = 0.0
    while True:
        status = _status_or_start(spec, heartbeat_timeout_s)
        rivals = None if status is None else _rivals(status, spec)
        if status is None or rivals is None:
            return
        if not waited:
            _log.warning(
                "the coordinator at %s belongs to an earlier start; waiting for it to end",
                spec.coordinator,
            )
        for rival in rivals:
            if waited > _GRACE_S and 0 <= rival.heartbeat_age_s < waited - _GRACE_S:
                raise StartupFailed(
                    _side_by_side(status, rival, spec), processes=(spec.process_id,)
                )
        outlived = waited > HEARTBEATS_PER_TIMEOUT * status.heartbeat_interval_s
        if outlived and status.phase in _JOINABLE and not _is_of_another(status, spec):
            return
        if not deadline.remaining_s():
            raise StartupFailed(
                f"the coordinator at {spec.coordinator} is {status.phase}: it belongs to an earlier"
                f" start ({_name(status)}; this one is {_name(spec)}); let it end, or take another"
                " port",
                elapsed_s=deadline.elapsed_s(),
                timeout_s=deadline.timeout_s,
                knob="timeout_s",
            )
        pause_s = min(_POLL_S, deadline.remaining_s())
        time.sleep(pause_s)
        waited += pause_s


def _status_or_start(spec: ProcessSpec, heartbeat_timeout_s: float | None) -> StatusResponse | None:
    """Returns what `status_at` does; where nobody answers, process 0 starts the coordinator."""
    status = status_at(spec.coordinator)
    if status is not None or spec.process_id != 0:
        return status
    try:
        _start(spec, _endpoint(spec.coordinator), heartbeat_timeout_s)
    except CoordinationError:
        # Of two jobs that come at one moment, one was faster.
        status = status_at(spec.coordinator)
        if status is None:
            raise
    return status


def status_at(address: str) -> StatusResponse | None:
    """Returns how far the job at an address is; an empty status where whoever listens does not say,
    None where nobody answers.
    """
    try:
        with StatusClient(address, timeout_s=_STATUS_TIMEOUT_S) as client:
            return client.status()
    except CoordinationError as error:
        return None if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else _SAID_NOTHING


def _rivals(status: StatusResponse, spec: ProcessSpec) -> Sequence[TaskStatus] | None:
    """Returns the processes for which this one has to wait, None where it can join them."""
    here = [task for task in status.tasks if task.state == CONNECTED and task.has_session]
    if _is_of_another(status, spec):
        return here
    same = [task for task in here if task.task_id == spec.process_id]
    return same if same or status.phase not in _JOINABLE else None


def _is_of_another(status: StatusResponse, spec: ProcessSpec) -> bool:
    if status.num_processes not in (0, spec.num_processes):
        return True
    both_say = bool(status.job and spec.job_id)
    return both_say and (status.job, status.attempt) != (spec.job_id, spec.attempt)


def _side_by_side(status: StatusResponse, rival: TaskStatus, spec: ProcessSpec) -> str:
    where = f"host {rival.host or 'unknown'}, pid {rival.pid}"
    return (
        f"the coordinator at {spec.coordinator} is that of {_name(status)}, whose process"
        f" {rival.task_id} lives ({where}); this is process {spec.process_id} of {_name(spec)}"
        f" (host {socket.gethostname()}, pid {os.getpid()}): give each job an address of its own,"
        " and where they may meet, a name of its own (HOLDFAST_JOB_ID)"
    )


def _name(job: StatusResponse | ProcessSpec) -> str:
    name = job.job_id if isinstance(job, ProcessSpec) else job.job
    return f"job {name!r}, attempt {job.attempt}, of {counted(job.num_processes, 'process')}"


def gather_workers(
    worker: RayTrainWorker, deadline: Deadline, heartbeat_timeout_s: float | None
) -> ProcessSpec:
    """Returns who a worker of Ray Train is, once all have come. Raises StartupTimeout.

    Rank 0 starts the coordinator on its node.
    """
    spec = ProcessSpec(
        process_id=worker.rank,
        num_processes=worker.num_workers,
        coordinator=join_address(worker.host, 1),  # until rank 0 has told
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

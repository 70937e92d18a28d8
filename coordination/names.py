"""Names on the wire, in one place for both sides: rpc paths, headers, payload types; and the
releases of grpcio that were tested.
"""

from __future__ import annotations

import functools
import logging
import signal
from typing import Any, NamedTuple

import grpc

from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

from .errors import BarrierTimeout, CoordinationError, ProcessLost

log = logging.getLogger("holdfast.coordination")

PROFILE_A = "/xla.coordination.CoordinationService/"
PROFILE_B = "/tensorflow.CoordinationService/"
PROFILE_D = "/xla.DistributedRuntimeService/"
SESSION = "/holdfast.Coordination/Session"
STATUS = "/holdfast.Coordination/GetStatus"
STACKS = "/holdfast.Coordination/GetStacks"
REPORT_EXIT = "/holdfast.Coordination/ReportExit"
REPORT_EVENT = "/holdfast.Coordination/ReportEvent"
REPORT_GOODPUT = "/holdfast.Coordination/ReportGoodput"
END_ATTEMPT = "/holdfast.Coordination/EndAttempt"
OVER_FOLDER = "holdfast/attempt"
"""Holds the key `over` once a launcher has given the attempt up: its value says why."""

TOKEN_HEADER = "authorization"
"""Holds "Bearer <token>"."""
KEY_HEADER = "holdfast-key"
"""Holds the key of the process that a call speaks for."""
STATUS_DETAILS = "grpc-status-details-bin"
"""Holds the payloads of a failed unary call."""

_TYPES = "type.googleapis.com/"
MISSING_TYPE = f"{_TYPES}holdfast.Missing"
SERVICE_ERROR_TYPE = f"{_TYPES}tensorflow.CoordinationServiceError"
BARRIER_ERROR_TYPE = f"{_TYPES}tensorflow.BarrierError"
MISMATCH_TYPE = f"{_TYPES}tensorflow.ServiceMismatchError"

TESTED_GRPC = ((1, 66), (1, 86))
"""Releases of grpcio, from the first to before the second, whose private module was tested. Outside
it gRPC's public API serves.
"""


LOOK_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 2
"""Has a process of a job write its stacks from C into its file of vitals, though some thread holds
its interpreter.
"""
VITALS_INTERVAL_S = 0.5
"""So often a process whose interpreter runs touches its file of vitals."""


def vitals_file(process_id: int, thread: int) -> str:
    """Returns the name of the file in memory by which a process lets others of its host look at it;
    `thread` takes LOOK_SIGNAL.
    """
    return f"holdfast-vitals-{process_id}-{thread}"


@functools.cache
def is_tested_grpc(version: str = grpc.__version__) -> bool:
    """Returns whether the private module of the installed grpcio was tested; logs a warning, once,
    where it was not.
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    tested = TESTED_GRPC[0] <= release < TESTED_GRPC[1]
    if not tested:
        first, last = (".".join(map(str, each)) for each in TESTED_GRPC)
        what = (
            f"grpcio {version} was not tested, only {first} to before {last}: calls go through"
            " gRPC's public API, which is slower"
        )
        log.warning("%s; for the fast path install 'grpcio>=%s,<%s'", what, first, last)
    return tested


class Method(NamedTuple):
    """The messages of one call, over unary calls and over a Session."""

    request: Any
    response: Any


METHODS = {
    name: Method(getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response"))
    for name in (
        *(
            "RegisterTask",
            "Heartbeat",
            "PollForError",
            "ShutdownTask",
            "WatchTasks",
            "GetAliveTasks",
            "Barrier",
            "CancelBarrier",
        ),
        *(
            "InsertKeyValue",
            "GetKeyValue",
            "TryGetKeyValue",
            "IncrementKeyValue",
            "GetKeyValueDir",
            "DeleteKeyValue",
        ),
    )
}

SESSION_METHODS = METHODS | {
    name: Method(getattr(spb, f"{name}Request"), getattr(spb, f"{name}Response"))
    for name in ("Report", "ReportError", "Stacks")
}

_GATHERINGS = {
    pb.RegisterTaskRequest: "connect",
    pb.ShutdownTaskRequest: "shutdown",
    pb.GetAliveTasksRequest: "live",
}
_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def status_name(number: int) -> str:
    """Returns the name of a gRPC status code, "UNKNOWN" for a number that is none."""
    return _NAMES.get(number, "UNKNOWN")


def payloads_of(error: grpc.RpcError) -> dict[str, bytes]:
    """Returns the payloads that a failed unary call carries in its trailing metadata."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS:
            return dict(pb.StatusDetails.FromString(value).payloads)
    return {}


def make_error(
    code: str, message: str, payloads: dict[str, bytes], request: Any
) -> CoordinationError:
    """Returns the exception for a status of the service: BarrierTimeout and ProcessLost where the
    payloads name processes.
    """
    missing = spb.Missing.FromString(payloads.get(MISSING_TYPE, b"")).tasks
    lost = [task for task in missing if task.lost]
    error: CoordinationError
    if code == "DEADLINE_EXCEEDED" and (missing or isinstance(request, pb.BarrierRequest)):
        name = getattr(request, "barrier_id", "") or _GATHERINGS.get(type(request), "")
        progress = {task.task_id: line for task in missing if (line := _report_line(task.progress))}
        error = BarrierTimeout(
            message, name=name, missing=tuple(task.task_id for task in missing), progress=progress
        )
    elif lost:
        silent_s = lost[0].silent_s if lost[0].silent_s >= 0 else None
        error = ProcessLost(
            message,
            code=code,
            process=lost[0].task_id,
            host=lost[0].host or None,
            silent_s=silent_s,
        )
    else:
        error = CoordinationError(message, code=code)
    if (barrier := payloads.get(BARRIER_ERROR_TYPE)) is not None:
        error.__dict__["_barrier_counter"] = pb.BarrierError.FromString(barrier).counter
    if MISMATCH_TYPE in payloads:
        error.__dict__["_service_mismatch"] = True
    return error


def _report_line(report: spb.ReportRequest) -> str:
    """Returns a report in words, such as "step 40, saved_step 30"."""
    return ", ".join(
        f"{field.name} {value}"
        for field, value in report.ListFields()
        if field.name != "values" and value != ""
    )


def barrier_counter(error: CoordinationError) -> int | None:
    """Returns the service's counter of the barrier that failed, from which the client's own
    resynchronises.
    """
    counter = error.__dict__.get("_barrier_counter")
    return counter if isinstance(counter, int) else None


def is_service_mismatch(error: CoordinationError) -> bool:
    """Returns whether the service answered that it is not the one that this client joined."""
    return "_service_mismatch" in error.__dict__

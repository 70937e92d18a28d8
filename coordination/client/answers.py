"""What the service answers: the messages of each call, and the error that a status becomes."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import grpc

from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

from ..errors import BarrierTimeout, CoordinationError, ProcessLost
from ..names import BARRIER_ERROR_TYPE, MISSING_TYPE
from ..task_bits import bits_from, tasks_of

ONCE = frozenset({"IncrementKeyValue"})
"""Methods whose second sending would do more than the first: one whose answer is lost fails. A
barrier's counter joins, or replays the result, and a client that sets a key reads it back.
"""

_GATHERINGS = {
    pb.RegisterTaskRequest: "connect",
    pb.ShutdownTaskRequest: "shutdown",
    pb.GetAliveTasksRequest: "live",
}
_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


@functools.cache
def response_of(method: str) -> Any:
    """Returns the message that a method is answered with."""
    if method == "GetAliveTasks":
        return spb.LivingTasks
    name = f"{method}Response"
    return getattr(spb, name, None) or getattr(pb, name)


def status_name(number: int) -> str:
    """Returns the name of a gRPC status code, "UNKNOWN" for a number that is none."""
    return _NAMES.get(number, "UNKNOWN")


def make_error(
    code: str, message: str, payloads: dict[str, bytes], request: Any
) -> CoordinationError:
    """Returns the exception for a status of the service: BarrierTimeout and ProcessLost where the
    payloads name processes.
    """
    about = spb.Missing.FromString(payloads.get(MISSING_TYPE, b""))
    missing = about.tasks
    lost = [task for task in missing if task.lost]
    error: CoordinationError
    if code == "DEADLINE_EXCEEDED" and (missing or isinstance(request, pb.BarrierRequest)):
        name = getattr(request, "barrier_id", "") or _GATHERINGS.get(type(request), "")
        progress = {task.task_id: line for task in missing if (line := _report_line(task.progress))}
        error = BarrierTimeout(message, name=name, missing=_everyone(about), progress=progress)
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
    return error


def _everyone(about: spb.Missing) -> tuple[int, ...]:
    """Returns all processes that an error is about, of which it describes the first."""
    if not about.everyone:
        return tuple(task.task_id for task in about.tasks)
    return tuple(sorted(tasks_of(bits_from(zlib.decompress(about.everyone)))))


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

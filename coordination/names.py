"""Names on the wire, in one place for both sides: rpc paths, headers, payload types, and the fields
by which a request says who calls.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

PROFILE_A = "/xla.coordination.CoordinationService/"
PROFILE_B = "/tensorflow.CoordinationService/"
PROFILE_D = "/xla.DistributedRuntimeService/"
SESSION = "/holdfast.Coordination/Session"
STATUS = "/holdfast.Coordination/GetStatus"
STACKS = "/holdfast.Coordination/GetStacks"
REPORT_EXIT = "/holdfast.Coordination/ReportExit"
REPORT_EVENT = "/holdfast.Coordination/ReportEvent"
REPORT_LAUNCHER = "/holdfast.Coordination/ReportLauncher"
END_ATTEMPT = "/holdfast.Coordination/EndAttempt"
REPORT_AGAIN = "ReportAgain"
"""The method of a Session by which a client repeats what it had reported."""
DEFECT = "the coordinator met a defect of its own"
"""With this begins what a coordinator answers that cannot serve a call."""
OVER_FOLDER = "holdfast/attempt"
"""Holds the key `over` once a launcher has given the attempt up, and `notice` once it has all
processes save and leave: their values say why.
"""
LAST_WORDS = "holdfast/last_words"
"""Holds a key for each process whose main thread an exception has left, or that leaves as a notice
has asked it to: its number, and what it says.
"""
NEXT_KEY = f"{OVER_FOLDER}/next"
"""Where the processes that outlive the attempt find the next one: a NextAttempt."""
GROW_KEY = f"{OVER_FOLDER}/grow"
"""Is there once all are to save and leave their loops, to come back as more."""
GROWING = "growing"
"""The reason of the notice that process 0 gives for that."""
DECIDES = "HOLDFAST_DECIDES"
"""Is set for processes whose launcher decides which of them outlive an attempt."""
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""Names the GPUs of a process, as jax.distributed.initialize reads it."""

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


def on_the_wire(text: str) -> str:
    """Returns text that UTF-8 can hold: what it cannot, of names that are not UTF-8, is escaped."""
    return text.encode(errors="backslashreplace").decode()


_NUMBERS = ("source_task_id", "requesting_task_id", "node_id", "process_id")
_TASKS = ("source_task", "requesting_task", "error_origin")


NOBODY = -(1 << 40)
"""The number of no task, and of none that a request can name."""


class Claim(NamedTuple):
    """A caller. The task is None where its incarnation alone names it or it need be nobody of the
    job, and NOBODY where nothing names it.
    """

    task_id: int | None
    incarnation: int = 0
    service_incarnation: int | None = None


@functools.cache
def _fields_of(kind: Any) -> tuple[str, str]:
    """Returns the fields of a kind of message that name its caller by a number, or as a task."""
    empty = kind()
    number = next((name for name in _NUMBERS if hasattr(empty, name)), "")
    # A repeated field asks about tasks, in nobody's name.
    single = (name for name in _TASKS if hasattr(getattr(empty, name, None), "task_id"))
    return number, next(single, "")


def claim_of(request: Any) -> Claim:
    """Returns who a request says that it is from."""
    number, task = _fields_of(request.__class__)
    incarnations = getattr(request, "incarnations", None)
    task_id = NOBODY if incarnations is None else None
    if number:
        task_id = getattr(request, number)
    elif task:
        task_id = getattr(request, task).task_id
    if incarnations is None:
        return Claim(task_id, getattr(request, "incarnation", 0))
    return Claim(task_id, incarnations.task_incarnation, incarnations.service_incarnation)

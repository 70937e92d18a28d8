"""Names on the wire, in one place for both sides: rpc paths, headers, payload types."""

from __future__ import annotations

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
RAISED_FOLDER = "holdfast/raised"
"""Holds a key for each process whose main thread an exception has left: its number, and what it
says.
"""
NEXT_KEY = f"{OVER_FOLDER}/next"
"""Where the processes that outlive the attempt find the next one: a NextAttempt."""

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

"""The messages of each call, and the errors that statuses of the service become."""

from __future__ import annotations

import grpc
import pytest

from holdfast.coordination import BarrierTimeout, CoordinationError, ProcessLost
from holdfast.coordination.client.answers import (
    barrier_counter,
    make_error,
    status_name,
)
from holdfast.coordination.names import BARRIER_ERROR_TYPE, MISSING_TYPE
from holdfast.proto import coordination_pb2, session_pb2

BARRIER = coordination_pb2.BarrierRequest(barrier_id="b")


def missing(*tasks: session_pb2.MissingTask) -> dict[str, bytes]:
    return {MISSING_TYPE: session_pb2.Missing(tasks=tasks).SerializeToString()}


def test_codes_have_names() -> None:
    """All of gRPC's; any other number is UNKNOWN."""
    assert [status_name(code.value[0]) for code in grpc.StatusCode] == [
        code.name for code in grpc.StatusCode
    ]
    assert status_name(99) == "UNKNOWN"


def test_a_barrier_out_of_time_names_the_missing() -> None:
    """Also without a payload; the gatherings have names of their own."""
    payloads = missing(
        session_pb2.MissingTask(task_id=3, silent_s=-1),
        session_pb2.MissingTask(task_id=1, silent_s=2),
    )
    error = make_error("DEADLINE_EXCEEDED", "m", payloads, BARRIER)
    assert isinstance(error, BarrierTimeout) and (error.name, error.missing) == ("b", (3, 1))
    bare = make_error("DEADLINE_EXCEEDED", "m", {}, BARRIER)
    assert isinstance(bare, BarrierTimeout) and bare.missing == ()
    for request, name in (
        (coordination_pb2.RegisterTaskRequest(), "connect"),
        (coordination_pb2.ShutdownTaskRequest(), "shutdown"),
    ):
        gathering = make_error("DEADLINE_EXCEEDED", "m", payloads, request)
        assert isinstance(gathering, BarrierTimeout) and gathering.name == name
    assert (
        type(make_error("DEADLINE_EXCEEDED", "m", {}, coordination_pb2.GetKeyValueRequest()))
        is CoordinationError
    )


@pytest.mark.parametrize(
    ("silent_s", "host", "expected"), [(2.5, "h", (1, "h", 2.5)), (-1, "", (1, None, None))]
)
def test_a_lost_process_is_named(silent_s: float, host: str, expected: tuple[object, ...]) -> None:
    """With host and silence, None where they are not known; the code stays."""
    lost = session_pb2.MissingTask(task_id=1, host=host, silent_s=silent_s, lost=True)
    error = make_error("INTERNAL", "m", missing(lost), BARRIER)
    assert (
        isinstance(error, ProcessLost)
        and (error.process, error.host, error.silent_s) == expected
        and error.code == "INTERNAL"
    )


def test_a_counter_travels_with_the_error() -> None:
    """Read back by the client; another error has none."""
    counted = {
        BARRIER_ERROR_TYPE: (
            coordination_pb2.BarrierError(barrier_id="b", counter=4).SerializeToString()
        )
    }
    assert barrier_counter(make_error("INTERNAL", "m", counted, BARRIER)) == 4
    assert barrier_counter(make_error("INTERNAL", "m", {}, BARRIER)) is None

"""Profile A's unary calls against a real service: joining, calls, errors, time-outs and the end of
the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.coordination import BarrierTimeout, CoordinationError, Credentials
from holdfast.coordination.client.answers import is_service_mismatch
from holdfast.coordination.client.unary import Identity, TransportError, UnaryTransport
from holdfast.coordination.deadline import Deadline
from holdfast.proto import coordination_pb2 as pb
from tests.support.in_process import INCARNATION, Served, serving

NO_CREDENTIALS = Credentials()


def unary(address: str, process_id: int = 0, incarnation: int = 5) -> UnaryTransport:
    return UnaryTransport(
        address, Identity(process_id, None, "", 0, "h", incarnation), NO_CREDENTIALS
    )


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(1, recoverable=True) as served:
        yield served


@pytest.fixture
def transport(served: Served) -> Iterator[UnaryTransport]:
    transport = unary(served.address)
    transport.join(Deadline(20))
    yield transport
    transport.close()


def test_calls_after_the_join_name_both_incarnations(
    served: Served, transport: UnaryTransport
) -> None:
    """The service knows the caller by them: a heartbeat and a key are taken."""
    transport.heartbeat(Deadline(20))
    transport.call(
        "InsertKeyValue", pb.InsertKeyValueRequest(kv={"key": "k", "value": b"v"}), Deadline(20)
    )
    request = pb.GetKeyValueRequest(key="k")
    assert transport.call("GetKeyValue", request, Deadline(20)).kv.value == b"v"
    assert (request.incarnations.task_incarnation, request.incarnations.service_incarnation) == (
        5,
        INCARNATION,
    )


def test_an_answer_of_the_service_is_its_exception(transport: UnaryTransport) -> None:
    """A code and a sentence."""
    with pytest.raises(CoordinationError, match="Config key none not found") as caught:
        transport.call("TryGetKeyValue", pb.TryGetKeyValueRequest(key="none"), Deadline(20))
    assert caught.value.code == "NOT_FOUND"


def test_a_barrier_out_of_time_is_a_timeout() -> None:
    """With its name; the barrier's own time ends it, and the call waits a little longer for the
    answer.
    """
    with serving(2) as served:
        transports = [unary(served.address, process_id, 5 + process_id) for process_id in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda transport: transport.join(Deadline(20)), transports))
        request = pb.BarrierRequest(barrier_id="b", barrier_timeout_in_ms=100)
        with pytest.raises(BarrierTimeout, match="1 of 2 at 'b', missing process 1") as caught:
            transports[0].call("Barrier", request, Deadline(5.1), grace_s=5.0)
        assert caught.value.name == "b"
        for transport in transports:
            transport.close()


def test_another_life_of_the_service_is_recognised(served: Served) -> None:
    """A client that has not joined names no incarnation of the service: the error says that it is
    another.
    """
    stranger = unary(served.address)
    with pytest.raises(CoordinationError) as caught:
        stranger.heartbeat(Deadline(20))
    assert is_service_mismatch(caught.value)
    stranger.close()


def test_a_call_has_its_own_time(transport: UnaryTransport) -> None:
    """A wait for a key ends with the deadline, less the grace for the answer."""
    deadline = Deadline(5.2)
    with pytest.raises(CoordinationError) as caught:
        transport.call("GetKeyValue", pb.GetKeyValueRequest(key="never"), deadline, grace_s=5.0)
    assert caught.value.code == "DEADLINE_EXCEEDED" and not deadline.passed()


def test_nobody_listens() -> None:
    """A TransportError, which may be tried again."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        transport = unary(f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(TransportError) as caught:
            transport.join(Deadline(5))
        assert caught.value.sent
        transport.close()


def test_closing_ends_calls_in_flight_and_later_ones(
    served: Served, transport: UnaryTransport
) -> None:
    """The one in flight ends at once; a later one surely never left."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            transport.call, "GetKeyValue", pb.GetKeyValueRequest(key="never"), Deadline(60)
        )
        while not served.service.machine.keys._by_call:
            transport.heartbeat(Deadline(20))
        transport.close()
        assert waiting.exception(20) is not None
    with pytest.raises(TransportError, match="the client is closed") as caught:
        transport.heartbeat(Deadline(20))
    assert not caught.value.sent

"""Both transports keep one contract: calls, errors with payloads, Sessions, clients that go away, a
port that is taken, and the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any

import grpc
import pytest

from holdfast.coordination import CoordinationClient
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.limits import Config, Limits
from holdfast.coordination.names import PROFILE_A, PROFILE_B, SESSION, STATUS, STATUS_DETAILS
from holdfast.coordination.server.service import Service
from holdfast.coordination.server.transport_aio import AioTransport
from holdfast.coordination.server.transport_completion_queue import CompletionQueueTransport
from holdfast.coordination.server.transports import Listening, channel_options
from holdfast.proto import coordination_b_pb2, coordination_pb2, session_pb2
from tests.support.in_process import INCARNATION, Served, serving

OWN_POOL = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture(params=[False, True], ids=["completion-queue", "grpc.aio"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(2, aio=request.param, recoverable=True) as served:
        yield served


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address, OWN_POOL) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: object, timeout_s: float = 20) -> bytes:
    return bytes(
        channel.unary_unary(PROFILE_B + method)(request.SerializeToString(), timeout=timeout_s)
    )  # type: ignore[attr-defined]


def opening(process_id: int = 0) -> session_pb2.ClientFrame:
    return session_pb2.ClientFrame(
        open=session_pb2.Open(process_id=process_id, incarnation=5 + process_id, host="h")
    )


def test_a_unary_call_is_answered(channel: grpc.Channel) -> None:
    """A key that is set is read back; a get that waits is answered by the set."""
    get = coordination_b_pb2.GetKeyValueRequest(key="k")
    late = channel.unary_unary(PROFILE_B + "GetKeyValue").future(
        get.SerializeToString(), timeout=20
    )
    call(
        channel,
        "InsertKeyValue",
        coordination_b_pb2.InsertKeyValueRequest(kv={"key": "k", "value": b"v"}),
    )
    assert coordination_b_pb2.GetKeyValueResponse.FromString(late.result()).kv.value == b"v"


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/nobody/Knows", b"", "UNIMPLEMENTED"),
        (PROFILE_A + "Barrier", b"\xff\xff", "INVALID_ARGUMENT"),
        ("nonsense", b"", "UNIMPLEMENTED"),
    ],
)
def test_an_unknown_rpc_is_its_senders_error(
    channel: grpc.Channel, path: str, body: bytes, code: str
) -> None:
    """An unknown path and a body that is no message; the next call is served."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path)(body, timeout=20)
    assert caught.value.code().name == code
    channel.unary_unary(STATUS)(b"", timeout=20)


def test_an_error_holds_its_payloads(channel: grpc.Channel) -> None:
    """The trailing metadata of a failed call holds what C++ agents act on."""
    request = coordination_pb2.HeartbeatRequest(
        source_task_id=0, incarnations={"service_incarnation": INCARNATION + 1}
    )
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(PROFILE_A + "Heartbeat")(request.SerializeToString(), timeout=20)
    details = dict(caught.value.trailing_metadata())[STATUS_DETAILS]
    assert (
        "type.googleapis.com/tensorflow.ServiceMismatchError"
        in coordination_pb2.StatusDetails.FromString(details).payloads
    )


def test_a_session_is_a_stream_of_frames(channel: grpc.Channel) -> None:
    """Opened, then replies by number and a full delta; the stream ends with the client's frames."""
    beat = session_pb2.Request(id=3, method="Heartbeat", body=b"")
    frames = [opening(), session_pb2.ClientFrame(request=beat)]
    stream = channel.stream_stream(SESSION)(
        (frame.SerializeToString() for frame in frames), timeout=20
    )
    kinds = [session_pb2.ServerFrame.FromString(frame) for frame in stream]
    assert kinds[0].opened.num_processes == 2 and kinds[0].opened.service_incarnation == INCARNATION
    assert [frame.reply.id for frame in kinds if frame.HasField("reply")] == [3]


def test_a_stream_may_be_ended_by_the_service(channel: grpc.Channel) -> None:
    """A first frame that is no Open ends with its code and sentence."""
    frame = session_pb2.ClientFrame(
        request=session_pb2.Request(id=1, method="Heartbeat")
    ).SerializeToString()
    with pytest.raises(grpc.RpcError, match="a Session's first frame is Open") as caught:
        next(channel.stream_stream(SESSION)(iter([frame]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_client_that_goes_away_waits_no_longer(served: Served, channel: grpc.Channel) -> None:
    """A get that is cancelled, and a get of a Session whose stream breaks, are forgotten by the
    machine.
    """
    broken = threading.Event()

    def frames() -> Iterator[bytes]:
        yield opening().SerializeToString()
        get = coordination_pb2.GetKeyValueRequest(key="never").SerializeToString()
        yield session_pb2.ClientFrame(
            request=session_pb2.Request(id=1, method="GetKeyValue", body=get)
        ).SerializeToString()
        broken.wait(60)

    def wait_for(count: int) -> None:
        deadline = Deadline(20)
        while len(list(served.service.machine.keys.waiting())) != count:
            assert not deadline.passed()
            channel.unary_unary(STATUS)(b"", timeout=20)  # a turn of the service's loop

    with grpc.insecure_channel(served.address, OWN_POOL) as other:
        stream = other.stream_stream(SESSION)(frames(), timeout=60)
        get = coordination_b_pb2.GetKeyValueRequest(key="never").SerializeToString()
        unary = other.unary_unary(PROFILE_B + "GetKeyValue").future(get, timeout=60)
        wait_for(2)
        unary.cancel()
        wait_for(1)
        stream.cancel()
        wait_for(0)
    broken.set()


def test_the_end_of_the_service_ends_its_sessions(served: Served, channel: grpc.Channel) -> None:
    """An open Session hears CANCELLED with the reason, and the port is free."""

    def frames() -> Iterator[bytes]:
        yield opening().SerializeToString()
        served.thread.join(20)  # the client has not said all

    stream = channel.stream_stream(SESSION)(frames(), timeout=20)
    next(stream)
    served.stop()
    with pytest.raises(grpc.RpcError) as caught:
        for _ in stream:
            pass
    assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(grpc.RpcError):
        channel.unary_unary(STATUS)(b"", timeout=1)


def test_a_token_is_asked_of_every_call() -> None:
    """Unary calls and Sessions without it are UNAUTHENTICATED over both transports."""
    for aio in (False, True):
        with (
            serving(1, aio=aio, token="a long enough token") as served,
            grpc.insecure_channel(served.address, OWN_POOL) as channel,
        ):
            attempts = [
                lambda channel=channel: channel.unary_unary(STATUS)(b"", timeout=20),
                lambda channel=channel: next(
                    channel.stream_stream(SESSION)(
                        iter([opening().SerializeToString()]), timeout=20
                    )
                ),
            ]
            for attempt in attempts:
                with pytest.raises(grpc.RpcError) as caught:
                    attempt()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            metadata = (("authorization", "Bearer a long enough token"),)
            channel.unary_unary(STATUS)(b"", timeout=20, metadata=metadata)


@pytest.mark.parametrize("aio", [False, True])
def test_a_port_that_is_taken_is_refused(served: Served, aio: bool) -> None:
    """OSError with the address, though gRPC would share the port silently."""
    listening = Listening(served.address)
    service = Service(Machine(Config(1, 1), time.monotonic()), listening.clock)

    async def bind() -> int:
        return AioTransport(service, listening).bind()

    with pytest.raises(OSError, match=f"cannot listen at {served.address}"):
        asyncio.run(bind()) if aio else CompletionQueueTransport(service, listening).bind()


def test_the_largest_request_is_the_limits() -> None:
    """gRPC lets in what `Limits` says, and shares no port."""
    options = dict(channel_options(Config(1, 1, limits=Limits(value_bytes=100, key_bytes=10))))
    assert (
        options["grpc.max_receive_message_length"] == 110 + 64 * 1024
        and options["grpc.so_reuseport"] == 0
    )


@pytest.mark.parametrize("aio", [False, True], ids=["completion-queue", "grpc.aio"])
def test_no_connection_ends_before_the_heartbeat(aio: bool) -> None:
    """The kernel keeps the connections of both sides for longer than the heartbeat timeout, though
    nothing is acknowledged: a cut of the network is silence, and no process's end.
    """
    with serving(1, aio=aio, heartbeat_timeout_s=300.0) as served:
        port = int(served.address.rpartition(":")[2])
        with CoordinationClient(served.address, 0):
            sides = Counter(
                (found.getsockname()[1] == port, found.getsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT))
                for found in _connections(port)
            )
    assert {is_service for is_service, _ in sides} == {True, False}
    assert all(timeout_ms > 3 * 300_000 for _, timeout_ms in sides), sides


def _connections(port: int) -> Iterator[socket.socket]:
    """Yields this process's sockets whose connection has `port` at one end."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue  # a copy of it would stay open
            with socket.socket(fileno=os.dup(int(name))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and port in (found.getsockname()[1], found.getpeername()[1]):
                    yield found


def test_all_calls_of_a_large_job_may_come_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 1,250 processes makes 5,000 calls over 20 connections while its service is busy for
    a moment: all are answered, none is refused because too many wait to be taken.
    """
    request = coordination_b_pb2.TryGetKeyValueRequest(key="k").SerializeToString()
    with serving(1_250) as served, contextlib.ExitStack() as channels:
        asks = []
        for number in range(20):
            options = (*OWN_POOL, ("test.number", number))
            channel = channels.enter_context(grpc.insecure_channel(served.address, options))
            grpc.channel_ready_future(channel).result(20)
            asks.append(channel.unary_unary(PROFILE_B + "TryGetKeyValue"))
        go_on = threading.Event()
        take = served.service.unary

        def busy(*arguments: Any) -> Any:
            go_on.wait(30)
            return take(*arguments)

        monkeypatch.setattr(served.service, "unary", busy)
        calls = [ask.future(request, timeout=60) for _ in range(250) for ask in asks]
        time.sleep(0.5)  # nothing says that all of them have reached the socket
        go_on.set()
        codes = Counter(call.code() for call in calls)
    assert codes == {grpc.StatusCode.NOT_FOUND: 5_000}

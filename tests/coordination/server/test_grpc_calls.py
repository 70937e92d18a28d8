"""gRPC's calls: answers, errors with payloads, clients that go away, and many at one moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.limits import Config, Limits
from holdfast.coordination.names import PROFILE_A, PROFILE_B, SESSION, STATUS, STATUS_DETAILS
from holdfast.coordination.server.listening import channel_options
from holdfast.proto import coordination_b_pb2, coordination_pb2
from tests.support.in_process import INCARNATION, Served, serving

OWN_POOL = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(2, recoverable=True) as served:
        yield served


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address, OWN_POOL) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: object, timeout_s: float = 20) -> bytes:
    return bytes(
        channel.unary_unary(PROFILE_B + method)(request.SerializeToString(), timeout=timeout_s)
    )  # type: ignore[attr-defined]


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


def waiting_gets(served: Served, channel: grpc.Channel, count: int) -> list[Any]:
    """Returns calls that wait for a key, once the machine has them."""
    get = coordination_b_pb2.GetKeyValueRequest(key="never").SerializeToString()
    calls = [
        channel.unary_unary(PROFILE_B + "GetKeyValue").future(get, timeout=60) for _ in range(count)
    ]
    wait_for_waiting(served, count)
    return calls


def wait_for_waiting(served: Served, count: int) -> None:
    deadline = Deadline(20)
    with grpc.insecure_channel(served.address, OWN_POOL) as channel:
        while len(list(served.service.machine.keys.waiting())) != count:
            assert not deadline.passed()
            channel.unary_unary(STATUS)(b"", timeout=20)  # a turn of the service's loop


def test_a_client_that_goes_away_waits_no_longer(served: Served) -> None:
    """A get that is cancelled, and one whose connection breaks, are forgotten by the machine."""
    with grpc.insecure_channel(served.address, OWN_POOL) as other:
        calls = waiting_gets(served, other, 2)
        calls[0].cancel()
        wait_for_waiting(served, 1)
    wait_for_waiting(served, 0)


def test_calls_that_wait_hear_of_the_end(
    served: Served, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the service, by a sentence; its log has no traceback of each."""
    (get,) = waiting_gets(served, channel, 1)
    served.stop()
    error = get.exception(timeout=20)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the coordination service ends"
    assert not caplog.records


def test_a_session_of_an_older_holdfast_is_refused(channel: grpc.Channel) -> None:
    """With what it speaks, what the service speaks, and what to do."""
    with pytest.raises(grpc.RpcError, match=r"version \d .*an older one.*install one") as caught:
        next(channel.stream_stream(SESSION)(iter([b""]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_token_is_asked_of_every_call() -> None:
    """A call without it is UNAUTHENTICATED."""
    with (
        serving(1, token="a long enough token") as served,
        grpc.insecure_channel(served.address, OWN_POOL) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(STATUS)(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer a long enough token"),)
        channel.unary_unary(STATUS)(b"", timeout=20, metadata=metadata)


def test_the_largest_request_is_the_limits() -> None:
    """gRPC lets in what `Limits` says."""
    options = dict(channel_options(Config(1, 1, limits=Limits(value_bytes=100, key_bytes=10))))
    assert options["grpc.max_receive_message_length"] == 110 + 64 * 1024


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

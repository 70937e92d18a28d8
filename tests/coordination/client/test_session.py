"""A Session on the client's side, against a real service: joining, calls, deltas, broken streams,
and when it is over for good.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationError,
    Credentials,
    Fenced,
    StatusClient,
)
from holdfast.coordination.client.session import (
    ANSWER_GRACE_S,
    SessionTransport,
    TransportError,
)
from holdfast.coordination.deadline import Deadline
from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb
from tests.support.in_process import Served, serving
from tests.support.proxy import Proxy


class Joined:
    """A SessionTransport and what it reported."""

    def __init__(
        self,
        address: str,
        process_id: int = 0,
        incarnation: int = 5,
        kind: type[SessionTransport] = SessionTransport,
        **identity: Any,
    ) -> None:
        self.deltas: queue.SimpleQueue[spb.Delta] = queue.SimpleQueue()
        self.fenced: queue.SimpleQueue[CoordinationError] = queue.SimpleQueue()
        self.broken = threading.Event()
        who = spb.Open(process_id=process_id, host="h", incarnation=incarnation, **identity)
        self.transport = kind(
            address,
            who,
            Credentials(),
            on_delta=lambda delta, stream: self.deltas.put(delta),
            on_broken=self.broken.set,
            on_fenced=self.fenced.put,
        )

    def get(self, key: str) -> bytes:
        return bytes(
            self.transport.call(
                "GetKeyValue", pb.GetKeyValueRequest(key=key), Deadline(20)
            ).kv.value
        )

    def set(self, key: str, value: bytes) -> None:
        self.transport.call(
            "InsertKeyValue",
            pb.InsertKeyValueRequest(kv={"key": key, "value": value}),
            Deadline(20),
        )


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(1, recoverable=True, heartbeat_timeout_s=7.5, job="j", attempt=1) as served:
        yield served


@pytest.fixture
def joined(served: Served) -> Iterator[Joined]:
    joined = Joined(served.address)
    joined.transport.join(Deadline(20))
    yield joined
    joined.transport.close()


def wait_for(joined: Joined, served: Served, gets: int) -> None:
    """Waits until so many gets wait at the service."""
    deadline = Deadline(20)
    while len(list(served.service.machine.keys.waiting())) != gets:
        assert not deadline.passed()
        joined.transport.call("Heartbeat", pb.HeartbeatRequest(), Deadline(20))


def test_a_session_learns_the_heartbeat_timeout(joined: Joined) -> None:
    """Keys, heartbeats, an error of the service, and the service's settings."""
    joined.transport.call("Heartbeat", pb.HeartbeatRequest(), Deadline(20))
    joined.set("k", b"v")
    assert joined.get("k") == b"v"
    assert joined.transport.heartbeat_timeout_s == 7.5
    with pytest.raises(CoordinationError, match="NOT_FOUND: Config key none not found"):
        joined.transport.call("TryGetKeyValue", pb.TryGetKeyValueRequest(key="none"), Deadline(20))


def test_the_first_delta_is_full(joined: Joined) -> None:
    """It comes without being asked for, with host and pid."""
    delta = joined.deltas.get(timeout=20)
    assert [(task.info.task_id, task.host) for task in delta.tasks] == [(0, "h")]


def test_a_join_does_not_wait_for_the_others() -> None:
    """Who has joined has a heartbeat at once; gathering is a call, whose answer names the missing
    when its time is over.
    """
    with serving(2) as served:
        joined = Joined(served.address)
        joined.transport.join(Deadline(20))
        joined.transport.call("Heartbeat", pb.HeartbeatRequest(), Deadline(20))
        with pytest.raises(BarrierTimeout, match="missing process 1") as caught:
            joined.transport.call(
                "RegisterTask",
                pb.RegisterTaskRequest(),
                Deadline(0.3 + ANSWER_GRACE_S),
                ANSWER_GRACE_S,
            )
        assert caught.value.missing == (1,) and ANSWER_GRACE_S >= 1
        joined.transport.close()


@pytest.mark.parametrize(
    "identity", [{"job": "k", "attempt": 1}, {"job": "j", "attempt": 2}, {"num_processes": 3}]
)
def test_another_job_is_fenced(
    served: Served, identity: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """At the join, with the service's sentence, which the service logs."""
    joined = Joined(served.address, **identity)
    with pytest.raises(Fenced, match="this service coordinates"):
        joined.transport.join(Deadline(20))
    joined.transport.close()
    assert "a Session was refused: this service coordinates" in caplog.text


def test_a_second_session_fences_the_first(served: Served, joined: Joined) -> None:
    """ABORTED by the service is for good: the first is told once, and is not opened again."""
    other = Joined(served.address, incarnation=6)
    other.transport.join(Deadline(20))
    error = joined.fenced.get(timeout=20)
    assert (
        isinstance(error, Fenced)
        and "has opened another Session" in str(error)
        and not joined.broken.is_set()
    )
    other.transport.close()


def test_a_stream_that_breaks_may_be_opened_again(served: Served, joined: Joined) -> None:
    """Calls in flight are TransportErrors, on_broken is called, and after another join the same
    life goes on.
    """
    joined.set("k", b"v")
    stream = joined.transport._stream
    assert stream is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joined.get, "never")
        wait_for(joined, served, 1)
        stream.connection.end()
        assert isinstance(waiting.exception(20), TransportError)
    assert joined.broken.wait(20)
    with pytest.raises(TransportError, match="the session is being opened again") as caught:
        joined.get("k")
    assert not caught.value.sent
    joined.transport.join(Deadline(20))
    assert joined.get("k") == b"v" and joined.fenced.empty()
    # A stream that was given up, and arrives after the next, takes no place.
    assert served.service.sessions._latest == {0: (5, 2)}


def test_a_wait_ends_at_the_callers_own_time(joined: Joined) -> None:
    """The service says that the time is over, and the call waits a little longer for that answer;
    the Session goes on.
    """
    deadline = Deadline(0.2 + ANSWER_GRACE_S)
    with pytest.raises(CoordinationError, match="key 'never' was not set within") as caught:
        joined.transport.call(
            "GetKeyValue", pb.GetKeyValueRequest(key="never"), deadline, ANSWER_GRACE_S
        )
    assert caught.value.code == "DEADLINE_EXCEEDED" and not deadline.passed()
    joined.transport.call("Heartbeat", pb.HeartbeatRequest(), Deadline(20))


def test_an_unanswered_call_is_cancelled(served: Served, joined: Joined) -> None:
    """Beside another that reads: DEADLINE_EXCEEDED at its own time, and the service forgets the
    call; the other goes on waiting.
    """
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(joined.get, "late")
        wait_for(joined, served, 1)
        request = pb.GetKeyValueRequest(key="never")
        with pytest.raises(
            CoordinationError, match=r"GetKeyValue: no answer within 0.3 s"
        ) as caught:
            joined.transport.call(
                "GetKeyValue", request, Deadline(0.3), grace_s=-60.0
            )  # which gives the service more time than the caller
        assert caught.value.code == "DEADLINE_EXCEEDED"
        wait_for(joined, served, 1)
        joined.set("late", b"here")
        assert reader.result(20) == b"here"


def test_the_end_of_the_service_breaks_the_stream(served: Served, joined: Joined) -> None:
    """CANCELLED by a service that ends is no verdict: another may take its place."""
    served.stop()
    assert joined.broken.wait(20) and joined.fenced.empty()
    with pytest.raises(TransportError):
        joined.transport.join(Deadline(2))


def test_a_service_without_its_memory_is_not_joined(served: Served, joined: Joined) -> None:
    """Another incarnation at the same address is Fenced at the next join."""
    joined.transport._service = 12345  # the incarnation that was met first
    with pytest.raises(Fenced, match="restarted without its journal"):
        joined.transport.join(Deadline(20))


def test_a_closed_session_takes_no_calls(joined: Joined) -> None:
    """Neither calls nor joins; nothing was sent."""
    joined.transport.close()
    joined.transport.close()
    for attempt in (lambda: joined.get("k"), lambda: joined.transport.join(Deadline(5))):
        with pytest.raises(TransportError) as caught:
            attempt()
        assert not caught.value.sent
    assert not joined.broken.is_set()


def test_stacks_are_answered_by_the_process(served: Served, joined: Joined) -> None:
    """The service asks over the Session; the answer names this very thread."""
    with StatusClient(served.address) as client:
        [answer] = client.stacks([0])
    assert isinstance(answer, str)
    assert "test_stacks_are_answered_by_the_process" in answer and "MainThread" in answer


def test_nobody_listens() -> None:
    """A TransportError, which may be tried again."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        joined = Joined(f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(TransportError, match="refused"):
            joined.transport.join(Deadline(5))
        joined.transport.close()


def test_a_session_that_breaks_early_is_not_joined(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends after the service's first frame, before anybody holds the session:
    whoever joined learns of it at once.
    """
    accept = SessionTransport._accept
    ended = threading.Event()

    class Watched(SessionTransport):
        def ended(self, stream: Any, code: str, details: str) -> None:
            super().ended(stream, code, details)
            ended.set()

    with Proxy(served.address) as proxy:

        def accept_and_break(transport: SessionTransport, opened: spb.Opened) -> None:
            accept(transport, opened)
            proxy.cut()
            assert ended.wait(60)

        monkeypatch.setattr(Watched, "_accept", accept_and_break)
        joined = Joined(proxy.address, kind=Watched)
        try:
            with pytest.raises(TransportError, match="as it was opened"):
                joined.transport.join(Deadline(20))
        finally:
            joined.transport.close()

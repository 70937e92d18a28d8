"""A Session's connection at the service: who is let in, what is refused, and how it ends."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.limits import Limits
from holdfast.coordination.server.socket_stream import LEAVE_S
from holdfast.coordination.wire.frames import HELLO_BYTES, VERSION, head_of
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.in_process import INCARNATION, Served, serving
from tests.support.raw_session import RawSession

TOKEN = "a long enough token"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(2, recoverable=True) as served:
        yield served


def _hello(**fields: Any) -> bytes:
    hello = session_pb2.Hello(**({"version": VERSION} | fields))
    return session_pb2.ClientFrame(hello=hello).SerializeToString()


def _until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = Deadline(timeout_s)
    while not condition():
        assert not deadline.passed()
        time.sleep(0.005)


def test_a_session_is_frames(served: Served) -> None:
    """Opened, then replies by number and a full delta."""
    with RawSession(served.address).open(0, 5, host="h") as session:
        session.ask(3, "Heartbeat", coordination_pb2.HeartbeatRequest())
        frames = [session.read()]
        while not frames[-1].HasField("reply"):
            frames.append(session.read())
    assert frames[0].opened.num_processes == 2
    assert frames[0].opened.service_incarnation == INCARNATION
    assert frames[-1].reply.id == 3


@pytest.mark.parametrize(
    ("hello", "code", "sentence"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT", "not a ClientFrame"),
        (b"", "FAILED_PRECONDITION", "a Session's first frame is Hello"),
        (_hello(version=VERSION + 1), "FAILED_PRECONDITION", f"version {VERSION} .*{VERSION + 1}"),
        (_hello(), "UNAUTHENTICATED", "does not hold this job's token"),
        (_hello(authorization=f"Bearer {TOKEN}!"), "UNAUTHENTICATED", "does not hold"),
        (bytes(HELLO_BYTES + 1), "INVALID_ARGUMENT", f"{HELLO_BYTES + 1} bytes; expected at most"),
    ],
)
def test_nothing_comes_before_a_good_hello(hello: bytes, code: str, sentence: str) -> None:
    """An Open after a bad one is not looked at, and the connection is counted."""
    with serving(2, token=TOKEN) as served, RawSession(served.address, hello=hello) as session:
        with contextlib.suppress(OSError):
            session.open(0, 5)
        found, text = session.end()
        assert found == code and served.service.calls == 0
        assert re.search(sentence, text), text
        _until(lambda: served.service.status().turned_away == 1)


def test_the_token_lets_in() -> None:
    """With it the Session is opened."""
    hello = _hello(authorization=f"Bearer {TOKEN}", key="secret")
    with serving(2, token=TOKEN) as served, RawSession(served.address, hello=hello) as session:
        assert session.open(0, 5).read().HasField("opened")


def test_a_request_before_open_is_refused(served: Served) -> None:
    """With its code and sentence; then the connection is over."""
    with RawSession(served.address) as session:
        session.ask(1, "Heartbeat", coordination_pb2.HeartbeatRequest())
        assert session.end() == ("FAILED_PRECONDITION", "a Session's first frame is Open")
        with pytest.raises(EOFError):
            session.read()


def test_a_frame_beyond_the_limit_ends_its_session(served: Served) -> None:
    """By its length alone; the largest that is allowed is taken."""
    with RawSession(served.address).open(0, 5) as session:
        entry = coordination_pb2.KeyValueEntry(key="k", value=bytes(Limits().value_bytes))
        session.ask(1, "InsertKeyValue", coordination_pb2.InsertKeyValueRequest(kv=entry))
        while not (frame := session.read()).HasField("reply"):
            pass
        assert frame.reply.code == 0
        session.connection.sendall(head_of(Limits().message_bytes + 1))
        code, sentence = session.end()
        assert code == "INVALID_ARGUMENT" and "expected at most" in sentence


def test_what_was_written_arrives_before_the_end(served: Served) -> None:
    """Eight mebibytes that wait unread as another Session takes over arrive whole, and then why."""
    value = bytes(range(256)) * (8 << 12)
    with RawSession(served.address).open(0, 5) as session:
        entry = coordination_pb2.KeyValueEntry(key="k", value=value)
        session.ask(1, "InsertKeyValue", coordination_pb2.InsertKeyValueRequest(kv=entry))
        session.ask(2, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="k"))
        _until(lambda: served.service.calls == 3)
        with RawSession(served.address).open(0, 5) as other:
            assert other.read().HasField("opened")
            found = []
            while not (frame := session.read()).HasField("end"):
                found.append(frame)
        (reply,) = [frame.reply for frame in found if frame.reply.id == 2]
        held = coordination_pb2.GetKeyValueResponse.FromString(reply.body)
        assert held.kv.value == value
        assert frame.end.code == 10 and "has opened another Session" in frame.end.message


def test_one_that_never_reads_its_end_is_closed(served: Served) -> None:
    """After LEAVE_S without a byte read, though the value that waits for it is large."""
    with RawSession(served.address).open(0, 5) as session:
        entry = coordination_pb2.KeyValueEntry(key="k", value=bytes(32 << 20))
        session.ask(1, "InsertKeyValue", coordination_pb2.InsertKeyValueRequest(kv=entry))
        session.ask(2, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="k"))
        _until(lambda: served.service.calls == 3)
        began = time.monotonic()
        with RawSession(served.address).open(0, 5) as other:
            assert other.read().HasField("opened")
            streams = served.transport._streams
            _until(lambda: len(streams) == 1)
        assert LEAVE_S * 0.9 < time.monotonic() - began < 5 * LEAVE_S


def test_a_session_that_goes_away_waits_no_longer(served: Served) -> None:
    """Its get is forgotten by the machine, and its task is suspect."""
    waiting = served.service.machine.keys.waiting
    with RawSession(served.address).open(0, 5) as session:
        session.ask(1, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="never"))
        _until(lambda: len(list(waiting())) == 1)
    _until(lambda: not list(waiting()))
    assert served.service.machine.task_table.tasks[0].suspect_since is not None


def test_the_end_of_the_service_ends_its_sessions(served: Served) -> None:
    """An open Session hears CANCELLED with the reason, and the port is free."""
    with RawSession(served.address).open(0, 5) as session:
        assert session.read().HasField("opened")
        stopper = threading.Thread(target=served.stop)
        stopper.start()
        assert session.end() == ("CANCELLED", "the coordination service ends")
        stopper.join(20)
    with pytest.raises(ConnectionRefusedError):
        RawSession(served.address)

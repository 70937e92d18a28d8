"""A hostile request harms only its sender: what members, strangers and floods do to a service, and
what the others notice of it.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    Credentials,
    StatusClient,
    Timeouts,
)
from holdfast.coordination.client.stream import hello_of
from holdfast.coordination.limits import Limits
from holdfast.coordination.names import STATUS
from holdfast.coordination.wire.frames import PREAMBLE, framed, head_of
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.in_process import serving
from tests.support.processes import wait_until
from tests.support.raw_session import RawSession
from tests.support.secured import (
    LIAR,
    UNARY,
    Secured,
    Security,
    at_once,
    in_the_name_of,
    join,
    register,
    secure,
    together,
)


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return secure(tmp_path_factory.mktemp("security"))


@pytest.fixture
def opened() -> Iterator[tuple[CoordinationService, list[CoordinationClient]]]:
    with ExitStack() as stack:
        service = stack.enter_context(CoordinationService.spawn(2, recoverable=True))
        clients = join(service.address, [Credentials(), Credentials()])
        for client in clients:
            stack.callback(client.shutdown)
        yield service, clients


@dataclass
class Guarded:
    """A service with mTLS and token, two members that are watched over, and a third whose agent
    misbehaves.
    """

    service: CoordinationService
    clients: list[CoordinationClient]
    hostile: Credentials
    secured: Secured

    def together(self, name: str) -> None:
        """Fails unless the two pass a barrier of their own."""
        at_once(
            [
                lambda client=client: client.wait_at_barrier(name, 30_000, [0, 1])
                for client in self.clients
            ]
        )  # type: ignore[misc]


@pytest.fixture
def guarded(security: Security) -> Iterator[Guarded]:
    shown = [security.member() for _ in range(3)]
    with CoordinationService.spawn(3, recoverable=True, arguments=security.arguments) as service:
        members = [
            CoordinationClient(
                service.address, index, timeouts=Timeouts(init_s=30), credentials=shown[index]
            )
            for index in range(2)
        ]
        incarnation = []
        secured = Secured(service.address, members, shown, 0)

        def come() -> None:
            incarnation.append(
                register(secured.channel(shown[LIAR]), shown[LIAR], LIAR, secured.incarnation(LIAR))
            )

        at_once([*(member.connect for member in members), come])
        (secured.service_incarnation,) = incarnation
        yield Guarded(service, members, shown[LIAR], secured)
        at_once([member.shutdown for member in members])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_requests_harm_nobody(guarded: Guarded, seed: int) -> None:
    """2,500 requests of random bytes and of mutated messages from an admitted peer, on every rpc:
    barriers of the others go on.
    """
    chance = random.Random(seed)
    codes = Counter[str]()
    paths = [path for path in UNARY if not path.endswith(("ShutdownTask", "Shutdown"))]
    own = in_the_name_of(LIAR, guarded.secured)
    metadata = guarded.hostile.metadata()
    with guarded.secured.channel(guarded.hostile) as channel:
        pending = []
        for number in range(2_500):
            path = chance.choice(paths)
            body = (
                bytearray(own(path))
                if chance.random() < 0.5
                else bytearray(chance.randbytes(chance.randrange(200)))
            )
            for _ in range(chance.randrange(3) if body else 0):
                body[chance.randrange(len(body))] = chance.randrange(256)
            pending.append(
                channel.unary_unary(path).future(bytes(body), timeout=1, metadata=metadata)
            )
            if number % 250 == 0:
                guarded.together(f"fuzz {number}")
        for future in pending:
            error: Any = future.exception()
            own_end = (
                error is not None
                and error.code() is grpc.StatusCode.UNAVAILABLE
                and " is lost" in error.details()
            )
            codes["ITS OWN END" if own_end else "OK" if error is None else error.code().name] += (
                1  # a peer may report that it has ended
            )
    guarded.together("after")
    print("answers:", dict(codes))
    assert {
        "OK",
        "INVALID_ARGUMENT",
        "PERMISSION_DENIED",
    } <= codes.keys() and "UNAVAILABLE" not in codes, codes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_fuzzed_frames_harm_nobody(guarded: Guarded, seed: int) -> None:
    """300 Sessions of an admitted peer, each of an Open and ten frames of random or mutated bytes:
    barriers of the others go on.
    """
    chance = random.Random(seed)
    methods = [
        "Barrier",
        "InsertKeyValue",
        "GetKeyValue",
        "WatchTasks",
        "Heartbeat",
        "Report",
        "ReportError",
        "nothing",
    ]
    for number in range(300):
        frames = []
        for _ in range(10):
            request = session_pb2.Request(
                id=chance.randrange(5),
                method=chance.choice(methods),
                body=chance.randbytes(chance.randrange(60)),
            )
            frame = bytearray(session_pb2.ClientFrame(request=request).SerializeToString())
            for _ in range(chance.randrange(3)):
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            frames.append(
                bytes(frame) if chance.random() < 0.8 else chance.randbytes(chance.randrange(80))
            )
        # Its own end is no news to it.
        with RawSession(guarded.service.address, guarded.hostile) as session:
            with contextlib.suppress(OSError, EOFError):
                session.open(LIAR, 5)
                for body in frames:
                    session.send_bytes(body)
                session.connection.settimeout(0.05)
                session.end()
        if number % 50 == 0:
            guarded.together(f"frames {number}")
    guarded.together("after")


@pytest.mark.parametrize("idle", [500, pytest.param(2_000, marks=pytest.mark.slow)])
def test_garbage_and_idle_connections_harm_nobody(guarded: Guarded, idle: int) -> None:
    """300 connections of garbage and many idle ones, all held open: barriers of the others go on,
    a newcomer is served, and the garbage is counted.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = guarded.service.address.rsplit(":", 1)
    with ExitStack() as stack:
        for number in range(300 + idle):
            connection = stack.enter_context(socket.create_connection((host, int(port)), 10))
            if number < 300:
                connection.sendall(os.urandom(100))
            if number % 100 == 0:
                guarded.together(f"garbage {number}")
        guarded.together("all are there")
        with guarded.secured.channel(guarded.hostile) as channel:
            call = channel.unary_unary(STATUS)

            def is_counted() -> bool:
                answer = call(b"", timeout=20, metadata=guarded.hostile.metadata())
                return session_pb2.StatusResponse.FromString(answer).turned_away >= 290

            wait_until(is_counted)
    guarded.together("after")


def test_strangers_are_few_however_many_files_there_are() -> None:
    """Those beyond 1,024, and two for each process of the job, send the oldest away."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with serving(1) as served, ExitStack() as stack:
        host, port = served.address.split(":")
        for _ in range(1_100):
            stack.enter_context(socket.create_connection((host, int(port)), 20))
        doorway = served.transport.doorway
        wait_until(lambda: doorway.turned_away >= 1_100 - 1_026)
        assert doorway.turned_away == 1_100 - 1_026


def test_bad_frames_end_their_own_session(
    opened: tuple[CoordinationService, list[CoordinationClient]],
) -> None:
    """Random bytes, a request before Open, an unknown method, and an Open of another job."""
    service, clients = opened
    frames = session_pb2.ClientFrame
    cases = {
        b"\xff\xff\xff": "INVALID_ARGUMENT",
        frames(
            request=session_pb2.Request(id=1, method="Barrier")
        ).SerializeToString(): "FAILED_PRECONDITION",
        frames(
            open=session_pb2.Open(process_id=9, incarnation=1)
        ).SerializeToString(): "INVALID_ARGUMENT",
        frames(
            open=session_pb2.Open(process_id=0, incarnation=1, num_processes=7)
        ).SerializeToString(): "PERMISSION_DENIED",
    }
    for frame, expected in cases.items():
        with RawSession(service.address) as session:
            session.send_bytes(frame)
            assert session.end()[0] == expected, frame
    together(clients, "after")


def test_a_client_that_does_not_read_is_dropped(
    opened: tuple[CoordinationService, list[CoordinationClient]],
) -> None:
    """One that asks for 200 values of 4 MiB and reads none loses its Session, not the service its
    memory.
    """
    service, clients = opened
    clients[0].key_value_set_bytes("large", bytes(4 * 2**20))
    clients[1].shutdown()
    get = coordination_pb2.GetKeyValueRequest(key="large")
    before = _resident_bytes(service.pid)
    most = 0
    with RawSession(service.address) as session, StatusClient(service.address) as asking:
        session.open(1, 5)
        for number in range(1, 201):
            session.ask(number, "GetKeyValue", get)
        held = True
        while held:  # until the service has let the Session go
            most = max(most, _resident_bytes(service.pid))
            status = asking.status()
            held = status.tasks[1].has_session or status.calls < 200
    assert most - before < 30e6


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_flood_of_values_stops_at_the_quota(guarded: Guarded) -> None:
    """1.5 GB of values: RESOURCE_EXHAUSTED past 512 MiB, and resident memory stays under the quota
    and 100 MB.
    """
    before = _resident_bytes(guarded.service.pid)
    refused = 0
    value = os.urandom(8 * 2**20)
    most = 0
    for number in range(180):
        try:
            guarded.clients[0].key_value_set_bytes(f"flood/{number}", value)
        except CoordinationError as error:
            refused += error.code == "RESOURCE_EXHAUSTED"
        most = max(most, _resident_bytes(guarded.service.pid))
    print(f"refused {refused} of 180, memory grew by {(most - before) / 1e6:.0f} MB at most")
    assert refused >= 180 - 64
    assert most - before < 512 * 2**20 + 100e6
    guarded.together("after")


@dataclass(frozen=True)
class Stopped:
    """A connection of a stranger's that stops in the middle; `sends` is what it says before."""

    name: str
    sends: bytes


STOPPED = [
    Stopped("nothing", b""),
    Stopped("half a preamble", b"HF"),
    Stopped("a preamble", PREAMBLE),
    Stopped("half a frame", PREAMBLE + head_of(100) + b"x" * 50),
    Stopped("a Hello", PREAMBLE + framed(hello_of(()))),
    Stopped("the beginning of TLS", PREAMBLE + b"\x16\x03\x01\x00\xff\x01"),
]


@pytest.mark.parametrize("stopped", STOPPED, ids=lambda stopped: stopped.name)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_who_stops_in_the_middle_is_closed(security: Security, tls: bool, stopped: Stopped) -> None:
    """Within the bound, wherever it stopped; counted, and not in memory."""
    limits = Limits(idle_connection_s=1)
    with serving(1, limits=limits, tls=security.server if tls else None) as served:
        host, port = served.address.split(":")
        with socket.create_connection((host, int(port)), 20) as stranger:
            stranger.sendall(stopped.sends)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # a preamble, and perhaps an End
                    pass
        while served.service.status().turned_away != 1:
            time.sleep(0.01)
        assert not served.transport._streams

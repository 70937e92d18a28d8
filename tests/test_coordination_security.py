"""No stranger is let in, and a hostile request harms only its sender."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tls import Authority, Pems

from holdfast.coordination import CoordinationClient, CoordinationError, CoordinationService, Credentials
from holdfast.coordination._profile_d import RPCS_D
from holdfast.coordination._profiles import RPCS
from holdfast.coordination._service import SESSION, STATUS
from holdfast.proto import coordination_b_pb2, coordination_pb2, session_pb2

UNARY = [*RPCS, *RPCS_D, STATUS]


@dataclass
class Secured:
    """A service with mTLS and a token, two connected clients, and what strangers may try with."""

    address: str
    clients: list[CoordinationClient]
    good: Credentials
    foreign: Pems
    folder: Path

    def still_serves(self) -> None:
        """Fails unless the two clients pass a barrier and read what they have set."""
        threads = [threading.Thread(target=client.wait_at_barrier, args=("still", 30_000)) for client in self.clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert self.clients[1].key_value_try_get("mine") == "value"


def connected(address: str, count: int, credentials: Credentials | None = None) -> list[CoordinationClient]:
    clients = [CoordinationClient(address, process_id, credentials=credentials) for process_id in range(count)]
    threads = [threading.Thread(target=client.connect) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return clients


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority, foreign = Authority(folder, "ours"), Authority(folder, "theirs").issue("stranger")
    server, client = authority.issue("server"), authority.issue("client")
    token, old = folder / "token", folder / "old"
    token.write_text("a token of the job, long enough\n")
    old.write_text("a token of the attempt before\n")
    arguments = (f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={server.ca}", f"--token-file={token}")
    good = Credentials(token_file=str(token), tls_cert=client.cert, tls_key=client.key, tls_ca=client.ca)
    with ExitStack() as stack:
        service = stack.enter_context(CoordinationService.spawn(2, recoverable=True, arguments=arguments))
        clients = connected(service.address, 2, good)
        for each in clients:
            stack.callback(each.shutdown)
        clients[0].key_value_set("mine", "value")
        for process_id in range(2):  # jaxlib's agent, beside each client
            channel = stack.enter_context(good.channel(service.address, (("grpc.use_local_subchannel_pool", 1),)))
            request = coordination_pb2.RegisterTaskRequest(incarnation=1000 + process_id, source_task_id=process_id)
            register = channel.unary_unary("/xla.coordination.CoordinationService/RegisterTask")
            register(request.SerializeToString(), timeout=20, metadata=good.metadata())
        yield Secured(service.address, clients, good, foreign, folder)


def every_rpc(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], body: Callable[[str], bytes]) -> dict[str, str]:
    """Calls every rpc, Session too, and returns how each ended."""
    ended = {}
    for path in UNARY:
        try:
            channel.unary_unary(path)(body(path), timeout=5, metadata=metadata)
            ended[path] = "OK"
        except grpc.RpcError as error:
            ended[path] = error.code().name
    frame = session_pb2.ClientFrame(open=session_pb2.Open(process_id=0, incarnation=5)).SerializeToString()
    try:
        next(channel.stream_stream(SESSION)(iter([frame]), timeout=5, metadata=metadata))
        ended[SESSION] = "OK"
    except grpc.RpcError as error:
        ended[SESSION] = error.code().name
    return ended


def strangers(secured: Secured) -> dict[str, Credentials | None]:
    good, foreign = secured.good, secured.foreign
    return {
        "no certificate": Credentials(token_file=good.token_file, tls_ca=good.tls_ca),
        "another authority": Credentials(token_file=good.token_file, tls_cert=foreign.cert, tls_key=foreign.key, tls_ca=good.tls_ca),
        "plaintext": Credentials(token_file=good.token_file),
        "no token": Credentials(tls_cert=good.tls_cert, tls_key=good.tls_key, tls_ca=good.tls_ca),
        "an old token": Credentials(str(secured.folder / "old"), good.tls_cert, good.tls_key, good.tls_ca),
    }


@pytest.mark.parametrize("who", ["no certificate", "another authority", "plaintext", "no token", "an old token"])
def test_a_stranger_is_served_nothing(secured: Secured, who: str) -> None:
    """Every rpc of every profile is refused, and the job goes on."""
    credentials = strangers(secured)[who]
    assert credentials is not None
    with credentials.channel(secured.address, ()) as channel:
        ended = every_rpc(channel, credentials.metadata(), lambda path: b"")
    expected = {"UNAUTHENTICATED"} if "token" in who else {"UNAVAILABLE"}
    assert set(ended.values()) == expected, ended
    secured.still_serves()


def _as_process_0(path: str) -> bytes:
    """Returns a request that claims to come from process 0, with an incarnation made up."""
    name = path.rsplit("/", 1)[1]
    incarnations = coordination_pb2.Incarnations(task_id=0, task_incarnation=5, service_incarnation=5)
    if "xla.coordination" in path and name != "RegisterTask":
        request = getattr(coordination_pb2, f"{name}Request")(incarnations=incarnations)
        return bytes(request.SerializeToString())
    if "tensorflow" in path:
        return coordination_b_pb2.BarrierRequest(barrier_id="x").SerializeToString()
    return coordination_pb2.RegisterTaskRequest(incarnation=5).SerializeToString()


def test_a_task_id_is_used_by_its_owner_alone(secured: Secured) -> None:
    """A peer with certificate and token, but another's process id, is refused on every rpc that speaks for a process."""
    with secured.good.channel(secured.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        ended = every_rpc(channel, secured.good.metadata(), _as_process_0)
    assert ended.pop(STATUS) == "OK"  # for everyone with certificate and token
    assert "OK" not in ended.values(), ended
    assert {ended[path] for path in ended if path.endswith(("/RegisterTask", "/Session"))} == {"PERMISSION_DENIED"}, ended
    secured.still_serves()


# ---- Hostile peers of an open service ----------------------------------------------------------------------------------------------


@pytest.fixture
def opened() -> Iterator[tuple[CoordinationService, list[CoordinationClient]]]:
    with ExitStack() as stack:
        service = stack.enter_context(CoordinationService.spawn(2, recoverable=True))
        clients = connected(service.address, 2)
        for client in clients:
            stack.callback(client.shutdown)
        yield service, clients


def together(clients: list[CoordinationClient], name: str) -> None:
    threads = [threading.Thread(target=client.wait_at_barrier, args=(name, 30_000)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not any(thread.is_alive() for thread in threads), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_requests_harm_nobody(opened: tuple[CoordinationService, list[CoordinationClient]], seed: int) -> None:
    """2,500 requests of random bytes and of mutated messages on every rpc: the service lives, and barriers of the others go on."""
    service, clients = opened
    chance = random.Random(seed)
    paths = [path for path in UNARY if not path.endswith(("ShutdownTask", "Shutdown"))]
    with grpc.insecure_channel(service.address) as channel:
        pending = []
        for number in range(2_500):
            path = chance.choice(paths)
            body = bytearray(_as_process_0(path)) if chance.random() < 0.5 else bytearray(chance.randbytes(chance.randrange(200)))
            for _ in range(chance.randrange(3) if body else 0):
                body[chance.randrange(len(body))] = chance.randrange(256)
            pending.append(channel.unary_unary(path).future(bytes(body), timeout=1))
            if number % 250 == 0:
                together(clients, f"fuzz {number}")
        for future in pending:
            future.exception()
    together(clients, "after")


@pytest.mark.parametrize("idle", [500, pytest.param(2_000, marks=pytest.mark.slow)])
def test_garbage_and_idle_connections_harm_nobody(opened: tuple[CoordinationService, list[CoordinationClient]], idle: int) -> None:
    """300 connections of garbage and many idle ones: barriers of the others go on."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    service, clients = opened
    host, port = service.address.rsplit(":", 1)
    with ExitStack() as stack:
        for number in range(300 + idle):
            connection = stack.enter_context(socket.create_connection((host, int(port)), 10))
            if number < 300:
                connection.sendall(os.urandom(100))
            if number % 100 == 0:
                together(clients, f"garbage {number}")
    together(clients, "after")


def test_bad_frames_end_their_own_session(opened: tuple[CoordinationService, list[CoordinationClient]]) -> None:
    """Random bytes, a request before Open, an unknown method, and an Open of another job."""
    service, clients = opened
    frames = session_pb2.ClientFrame
    cases = {
        b"\xff\xff\xff": "INVALID_ARGUMENT",
        frames(request=session_pb2.Request(id=1, method="Barrier")).SerializeToString(): "FAILED_PRECONDITION",
        frames(open=session_pb2.Open(process_id=9, incarnation=1)).SerializeToString(): "INVALID_ARGUMENT",
        frames(open=session_pb2.Open(process_id=0, incarnation=1, num_processes=7)).SerializeToString(): "PERMISSION_DENIED",
    }
    with grpc.insecure_channel(service.address) as channel:
        for frame, expected in cases.items():
            call = channel.stream_stream(SESSION)(iter([frame]), timeout=10)
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code().name == expected, frame
    together(clients, "after")


def test_a_client_that_does_not_read_is_dropped(opened: tuple[CoordinationService, list[CoordinationClient]]) -> None:
    """One that asks for 200 values of 4 MiB and reads none loses its Session, not the service its memory."""
    service, clients = opened
    clients[0].key_value_set_bytes("large", bytes(4 * 2**20))
    clients[1].shutdown()
    get = coordination_pb2.GetKeyValueRequest(key="large").SerializeToString()
    frames = [session_pb2.ClientFrame(open=session_pb2.Open(process_id=1, incarnation=5))]
    frames += [session_pb2.ClientFrame(request=session_pb2.Request(id=number, method="GetKeyValue", body=get)) for number in range(1, 201)]
    before, most = _resident_bytes(service.pid), 0
    with grpc.insecure_channel(service.address, (("grpc.max_receive_message_length", -1),)) as channel:
        call = channel.stream_stream(SESSION)((frame.SerializeToString() for frame in frames), timeout=60)
        held = True
        while held:  # until the service has let the Session go
            most = max(most, _resident_bytes(service.pid))
            answer = channel.unary_unary(STATUS, response_deserializer=session_pb2.StatusResponse.FromString)(b"", timeout=20)
            held = answer.tasks[1].has_session or answer.calls < 200
        call.cancel()
    assert most - before < 300e6


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_flood_of_values_stops_at_the_quota(opened: tuple[CoordinationService, list[CoordinationClient]]) -> None:
    """1.5 GB of values: RESOURCE_EXHAUSTED past 512 MiB, and resident memory stays under the quota and 100 MB."""
    service, clients = opened
    before, refused = _resident_bytes(service.pid), 0
    value, most = os.urandom(8 * 2**20), 0
    for number in range(180):
        try:
            clients[0].key_value_set_bytes(f"flood/{number}", value)
        except CoordinationError as error:
            refused += error.code == "RESOURCE_EXHAUSTED"
        most = max(most, _resident_bytes(service.pid))
    assert refused >= 180 - 64
    assert most - before < 512 * 2**20 + 100e6
    together(clients, "after")

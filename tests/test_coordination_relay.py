"""A secured coordinator serves no stranger, and ordinary jax jobs reach it through a relay on each host (issue 3, show 7)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import certificates
import grpc
import pytest
from cluster import Processes, run_processes

from holdfast.coordination import CoordinationClient, CoordinationError, CoordinationService, Credentials, Relay
from holdfast.coordination._calls import SESSION
from holdfast.coordination._relay import PROFILES
from holdfast.proto import coordination_b_pb2, coordination_pb2, session_pb2

TOKEN = "a-token-of-this-job-0123456789abcdef"
PATHS = [
    f"/{service}/{name.removesuffix('Request')}"
    for service, module in PROFILES.items()
    for name in module.DESCRIPTOR.message_types_by_name
    if name.endswith("Request")
] + ["/holdfast.Coordination/GetStatus"]


@dataclass
class Secured:
    """A coordinator of 2 with mTLS and token, and what its own people hold."""

    service: CoordinationService
    own: Credentials
    other: certificates.Files
    folder: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secured")


def secured_service(folder: Path, num_processes: int) -> tuple[CoordinationService, Credentials]:
    files = certificates.make(folder, "own")
    (folder / "token").write_text(TOKEN + "\n")
    arguments = (f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}", f"--token-file={folder / 'token'}")
    service = CoordinationService.spawn(num_processes, heartbeat_timeout_s=60, recoverable=True, survivable=True, arguments=arguments)
    return service, Credentials(str(folder / "token"), files.cert, files.key, files.ca)


@pytest.fixture(scope="module")
def secured(folder: Path) -> Iterator[Secured]:
    service, own = secured_service(folder, 3)
    with service:
        yield Secured(service, own, certificates.make(folder, "other"), folder)


def stranger(secured: Secured, kind: str) -> Credentials:
    """Returns what a stranger of a kind shows."""
    own, other = secured.own, secured.other
    (secured.folder / "old").write_text("an-old-token-of-this-job-0123456789")
    return {
        "plaintext": Credentials(own.token_file),
        "no certificate": Credentials(own.token_file, tls_ca=own.tls_ca),
        "another CA's certificate": Credentials(own.token_file, other.cert, other.key, own.tls_ca),
        "no token": Credentials(None, own.tls_cert, own.tls_key, own.tls_ca),
        "an old token": Credentials(str(secured.folder / "old"), own.tls_cert, own.tls_key, own.tls_ca),
    }[kind]


STRANGERS = ["plaintext", "no certificate", "another CA's certificate", "no token", "an old token"]


@pytest.fixture(scope="module")
def members(secured: Secured) -> Iterator[list[CoordinationClient]]:
    """Three admitted clients, who meet at a barrier before and after each test."""
    clients = [CoordinationClient(secured.service.address, index, credentials=secured.own, init_timeout_s=30) for index in range(3)]
    meet([client.connect for client in clients])
    clients[0].key_value_set("secret", "42")
    yield clients
    meet([client.shutdown for client in clients])


def meet(calls: list) -> None:  # type: ignore[type-arg]
    failures: list[BaseException] = []

    def run(call) -> None:  # type: ignore[no-untyped-def]
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """No peer is disturbed: the members still meet, and what they said is unharmed."""
    yield
    if "members" in request.fixturenames:
        clients = request.getfixturevalue("members")
        meet([lambda client=client: client.wait_at_barrier("still here", 20_000) for client in clients])
        assert clients[1].key_value_try_get("secret") == "42"
        assert all(process.alive for process in clients[2].process_info())


@pytest.mark.parametrize("kind", STRANGERS)
def test_no_rpc_serves_a_stranger(kind: str, secured: Secured, members: list[CoordinationClient]) -> None:
    """Every rpc of every profile, our Session and our status refuse a plain grpc client before any state is touched."""
    shown = stranger(secured, kind)
    expected = {"UNAUTHENTICATED"} if "token" in kind else {"UNAVAILABLE"}
    with shown.channel(secured.service.address, ()) as channel:
        for path in PATHS:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(b"", timeout=10, metadata=shown.metadata())
            assert caught.value.code().name in expected, path
        opening = session_pb2.ClientFrame(open=session_pb2.Open(process_id=0, incarnation=5)).SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.stream_stream(SESSION)(iter([opening]), timeout=10, metadata=shown.metadata()))
        assert caught.value.code().name in expected


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("wire", [None, False])
def test_no_client_of_ours_joins_as_a_stranger(kind: str, wire: bool | None, secured: Secured, members: list[CoordinationClient]) -> None:
    """Our own client gets an error that says why, within its time."""
    client = CoordinationClient(secured.service.address, 1, credentials=stranger(secured, kind), init_timeout_s=1, session=wire)
    with pytest.raises(CoordinationError, match=r"UNAUTHENTICATED|no coordinator answered"):
        client.connect()


def test_a_task_id_is_its_owners(secured: Secured, members: list[CoordinationClient]) -> None:
    """An admitted peer cannot speak as a task that is another's, over a Session or any call of profiles A and B."""
    own = secured.own
    with pytest.raises(CoordinationError, match="another's"):
        CoordinationClient(secured.service.address, 1, credentials=own, init_timeout_s=2).connect()
    served: list[str] = []
    codes: dict[str, str] = {}
    with own.channel(secured.service.address, ()) as channel:
        for path in PATHS:
            module = PROFILES.get(path.split("/")[1])
            if module not in (coordination_pb2, coordination_b_pb2) or path.endswith("/RegisterTask"):
                continue  # a registration from the very host of a task's Session is that process's agent: trust goes by hosts
            request = getattr(module, f"{path.split('/')[2]}Request")()
            names = {field.name for field in request.DESCRIPTOR.fields}
            if "incarnations" in names:
                request.incarnations.task_id = 1
            for holder in {"source_task", "requesting_task"} & names:
                if hasattr(getattr(request, holder), "task_id"):
                    getattr(request, holder).task_id = 1
            for number in {"source_task_id", "requesting_task_id"} & names:
                setattr(request, number, 1)
            try:
                channel.unary_unary(path)(request.SerializeToString(), timeout=5, metadata=own.metadata())
                served.append(path)
            except grpc.RpcError as error:
                codes[path] = error.code().name
    assert not served, served
    assert set(codes.values()) <= {"PERMISSION_DENIED", "INTERNAL", "INVALID_ARGUMENT", "ABORTED", "UNIMPLEMENTED"}, codes


def test_a_relay_speaks_for_its_own_host_only(secured: Secured, members: list[CoordinationClient]) -> None:
    """Through a relay for task 2, neither a Session nor a registration of task 1 passes, nor a call of nobody."""
    with Relay.spawn(secured.service.address, secured.own, [2]) as relay:
        assert relay.address.startswith("127.0.0.1:")
        for wire in (None, False):
            with pytest.raises(CoordinationError, match="is not of this host: this relay speaks for"):
                CoordinationClient(relay.address, 1, init_timeout_s=5, session=wire).connect()
        with grpc.insecure_channel(relay.address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/xla.coordination.CoordinationService/Heartbeat")(b"\xff\xff", timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            request = coordination_pb2.TryGetKeyValueRequest(key="secret", incarnations=coordination_pb2.Incarnations(task_id=2))
            with pytest.raises(grpc.RpcError, match="has not registered through this relay"):
                channel.unary_unary("/xla.coordination.CoordinationService/TryGetKeyValue")(request.SerializeToString(), timeout=5)


def test_a_relay_ends_with_whoever_started_it(secured: Secured, folder: Path) -> None:
    """SIGKILL of the process that started a relay leaves no relay behind."""
    script = f"""
        import sys, time
        from holdfast.coordination import Credentials, Relay
        relay = Relay.spawn({secured.service.address!r}, Credentials(*sys.argv[3:]), [0])
        print("address", relay.address, flush=True)
        time.sleep(600)
    """
    own = secured.own
    with Processes(script, 1, arguments=[own.token_file, own.tls_cert, own.tls_key, own.tls_ca]) as processes:
        processes.wait_for(0, "address")
        host, port = processes.output(0).split()[-1].split(":")
        processes.kill(0)
        processes.popens[0].wait(10)
        for _ in range(100):
            try:
                socket.create_connection((host, int(port)), timeout=0.1).close()
            except OSError:
                return
            threading.Event().wait(0.1)
    pytest.fail("the relay still listens after 10 s")


JAX_JOB = """
    import os, sys
    index, count, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    from holdfast.coordination import CoordinationClient, Credentials, Relay
    credentials = Credentials(*sys.argv[4:])
    with Relay.spawn(coordinator, credentials, [index]) as relay, \\
            CoordinationClient(coordinator, index, num_processes=count, credentials=credentials, init_timeout_s=60) as client:
        import jax, numpy as np
        from jax.experimental import multihost_utils
        jax.distributed.initialize(relay.address, count, index, coordinator_bind_address="127.0.0.1:0", heartbeat_timeout_seconds=86400)
        assert jax.process_count() == count and jax.device_count() == count
        multihost_utils.sync_global_devices("here")
        assert multihost_utils.broadcast_one_to_all(np.int32(7 + index)) == 7
        assert multihost_utils.process_allgather(np.int32([index])).ravel().tolist() == list(range(count))
        client.wait_at_barrier("holdfast/own", 30_000)
        client.key_value_set(f"holdfast/{index}", "x")
        theirs = jax._src.distributed.global_state.client
        client.wait_at_barrier("holdfast/set", 30_000)
        assert len(theirs.key_value_dir_get("holdfast")) == count
        jax.distributed.shutdown()
    print("done", flush=True)
"""


def test_an_ordinary_jax_job_runs_through_relays(tmp_path: Path) -> None:
    """Four jax processes, each with its relay and our own client beside jaxlib's agent, run the full path against mTLS and token."""
    service, own = secured_service(tmp_path, 4)
    with service:
        arguments = [service.address, own.token_file, own.tls_cert, own.tls_key, own.tls_ca]
        outputs = run_processes(JAX_JOB, 4, arguments=arguments, timeout_s=100)
    assert all("done" in output for output in outputs)

"""What a job with mTLS and a token depends_on, and what strangers show; and members who meet."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from holdfast.coordination import CoordinationClient, Credentials, Timeouts
from holdfast.coordination.names import (
    END_ATTEMPT,
    PROFILE_A,
    PROFILE_B,
    PROFILE_D,
    REPORT_EXIT,
    STACKS,
    STATUS,
)
from holdfast.coordination.server.listening import Tls
from holdfast.coordination.server.profile_d import RPCS_D
from holdfast.coordination.server.profiles import RPCS
from holdfast.proto import (
    coordination_b_pb2,
    coordination_pb2,
    distributed_runtime_pb2,
    session_pb2,
)
from tests.support.tls import Authority

UNARY = [*RPCS, *RPCS_D, STATUS, STACKS, REPORT_EXIT, END_ATTEMPT]
MESSAGES = {
    PROFILE_A: coordination_pb2,
    PROFILE_B: coordination_b_pb2,
    PROFILE_D: distributed_runtime_pb2,
    "/holdfast.Coordination/": session_pb2,
}
TOKEN = "a token of the job, long enough"
VICTIM = 1
LIAR = 2
FOR_ALL = {STATUS, STACKS}  # every holder of certificate and token may ask how the job is


@dataclass
class Security:
    """Files of a secured job: what its members show, and what strangers may try with."""

    folder: Path
    own: Credentials
    server: Tls
    arguments: tuple[str, ...]

    def member(self) -> Credentials:
        """Returns what one more process of the job shows: certificate and token of the job, and a
        key of its own.
        """
        return Credentials(
            self.own.token_file, self.own.tls_cert, self.own.tls_key, self.own.tls_ca
        )

    def stranger(self, kind: str) -> Credentials:
        """Returns what a stranger shows."""
        own = self.own
        foreign = Authority(self.folder, "theirs").issue("stranger")
        (self.folder / "old").write_text("a token of the attempt before\n")
        return {
            "plaintext": Credentials(own.token_file),
            "no certificate": _WithoutCertificate(own.token_file, tls_ca=own.tls_ca),
            "another authority": Credentials(own.token_file, foreign.cert, foreign.key, own.tls_ca),
            "no token": Credentials(None, own.tls_cert, own.tls_key, own.tls_ca),
            "an old token": Credentials(
                str(self.folder / "old"), own.tls_cert, own.tls_key, own.tls_ca
            ),
        }[kind]


class _WithoutCertificate(Credentials):
    """Trusts the coordinator, and shows it nothing but the token: what Credentials itself
    refuses.
    """

    def __post_init__(self) -> None:
        pass

    def tls(self) -> grpc.ChannelCredentials:
        assert self.tls_ca is not None
        return grpc.ssl_channel_credentials(Path(self.tls_ca).read_bytes())

    def tls_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.tls_ca)


def secure(folder: Path) -> Security:
    """Makes the files of a secured job."""
    authority = Authority(folder, "ours")
    server = authority.issue("server")
    client = authority.issue("client")
    token = folder / "token"
    token.write_text(f"{TOKEN}\n")
    arguments = (
        f"--tls-cert={server.cert}",
        f"--tls-key={server.key}",
        f"--tls-ca={server.ca}",
        f"--token-file={token}",
    )
    own = Credentials(str(token), client.cert, client.key, client.ca)
    tls = Tls(Path(server.key), Path(server.cert), Path(server.ca))
    return Security(folder, own, tls, arguments)


def at_once(calls: list[Callable[[], object]]) -> None:
    """Runs calls in threads of their own, and fails unless all come back well."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failures and not any(thread.is_alive() for thread in threads), failures


def together(clients: list[CoordinationClient], name: str) -> None:
    """Fails unless the clients pass a barrier."""
    at_once([lambda client=client: client.wait_at_barrier(name, 30_000) for client in clients])  # type: ignore[misc]


def join(address: str, credentials: list[Credentials]) -> list[CoordinationClient]:
    """Returns connected clients, one for each of `credentials`."""
    clients = [
        CoordinationClient(address, index, timeouts=Timeouts(init_s=30), credentials=shown)
        for index, shown in enumerate(credentials)
    ]
    at_once([client.connect for client in clients])
    return clients


@dataclass
class Secured:
    """A service with mTLS and token, its members (each with a key of its own), and jaxlib's agents
    beside them.
    """

    address: str
    clients: list[CoordinationClient]
    credentials: list[Credentials]
    service_incarnation: int

    def incarnation(self, process_id: int) -> int:
        """Returns the incarnation of a member's agent."""
        return 1000 + process_id

    def channel(self, credentials: Credentials) -> grpc.Channel:
        return credentials.channel(self.address)

    def still_serves(self) -> None:
        """Fails unless nobody was disturbed: all meet, read what was set, are seen alive, and their
        agents are known.
        """
        together(self.clients, "still")
        assert self.clients[VICTIM].key_value_try_get("mine") == "value"
        assert all(process.alive for process in self.clients[0].process_info())
        for process_id, credentials in enumerate(self.credentials):
            with self.channel(credentials) as channel:
                request = coordination_pb2.HeartbeatRequest(
                    incarnation=self.incarnation(process_id), source_task_id=process_id
                )
                request.incarnations.CopyFrom(self.stamp(process_id))
                call = channel.unary_unary(PROFILE_A + "Heartbeat")
                call(request.SerializeToString(), timeout=10, metadata=credentials.metadata())

    def stamp(self, process_id: int) -> coordination_pb2.Incarnations:
        """Returns what profile A's calls of a member's agent hold."""
        incarnations = {
            "task_incarnation": self.incarnation(process_id),
            "service_incarnation": self.service_incarnation,
        }
        return coordination_pb2.Incarnations(task_id=process_id, **incarnations)


def register(
    channel: grpc.Channel, credentials: Credentials, process_id: int, incarnation: int
) -> int:
    """Registers an agent over profile A and returns the service's incarnation."""
    request = coordination_pb2.RegisterTaskRequest(
        incarnation=incarnation, source_task_id=process_id
    ).SerializeToString()
    with channel:
        answer = channel.unary_unary(PROFILE_A + "RegisterTask")(
            request, timeout=20, metadata=credentials.metadata()
        )
    return coordination_pb2.RegisterTaskResponse.FromString(answer).service_incarnation


def in_the_name_of(process_id: int, secured: Secured) -> Callable[[str], bytes]:
    """Returns a maker of requests that a process's agent would send, with its true incarnations, in
    all three profiles.
    """

    def request(path: str) -> bytes:
        service, method = path.rsplit("/", 1)
        if path in FOR_ALL:
            return b""
        message: Any = getattr(MESSAGES[service + "/"], f"{method}Request")()
        names = {field.name: field for field in message.DESCRIPTOR.fields}
        if "incarnations" in names:
            message.incarnations.CopyFrom(secured.stamp(process_id))
        if "incarnation" in names:
            message.incarnation = secured.incarnation(process_id)
        if "session_id" in names:
            message.session_id = secured.service_incarnation & ~3 | 1
        if "protocol_version" in names:
            message.protocol_version = 1
        if "local_topology" in names:
            message.local_topology.node_id = process_id
        for name in {
            "source_task_id",
            "requesting_task_id",
            "node_id",
            "process_id",
        } & names.keys():
            setattr(message, name, process_id)
        for name in {"source_task", "requesting_task", "error_origin"} & names.keys():
            if hasattr(task := getattr(message, name), "task_id"):  # else it is a list of tasks
                task.task_id = process_id
        return bytes(message.SerializeToString())

    return request

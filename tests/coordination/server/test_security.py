"""No stranger is let in, nobody speaks for another, and a hostile request harms only its sender."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import jax
import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    Credentials,
    Endpoint,
    Fenced,
    JobIdentity,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.coordination.core.status import Code
from holdfast.coordination.names import (
    KEY_HEADER,
    PROFILE_A,
    PROFILE_B,
    PROFILE_D,
    SESSION,
    TOKEN_HEADER,
)
from holdfast.coordination.wire.frames import VERSION
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.cluster import Processes
from tests.support.grpc_words import GRPC_WORDS
from tests.support.network import namespaces, python_in
from tests.support.paths import program
from tests.support.raw_session import RawSession
from tests.support.secured import (
    FOR_ALL,
    LIAR,
    UNARY,
    VICTIM,
    Secured,
    Security,
    at_once,
    in_the_name_of,
    join,
    register,
    secure,
    together,
)
from tests.support.tls import Authority

# --- Strangers and liars


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return secure(tmp_path_factory.mktemp("security"))


@pytest.fixture(scope="module")
def secured(security: Security) -> Iterator[Secured]:
    credentials = [security.member() for _ in range(3)]
    with ExitStack() as stack:
        service = stack.enter_context(
            CoordinationService.spawn(3, recoverable=True, arguments=security.arguments)
        )
        clients = join(service.address, credentials)
        for client in clients:
            stack.callback(client.shutdown)
        clients[0].key_value_set("mine", "value")
        secured = Secured(service.address, clients, credentials, 0)
        for process_id, shown in enumerate(credentials):
            secured.service_incarnation = register(
                secured.channel(shown), shown, process_id, secured.incarnation(process_id)
            )
        yield secured


def every_rpc(
    secured: Secured,
    credentials: Credentials,
    metadata: tuple[tuple[str, str], ...],
    body: Callable[[str], bytes],
    opening: session_pb2.Open,
) -> dict[str, str]:
    """Calls every rpc, Session too, and returns how each ended."""
    ended = {}
    with secured.channel(credentials) as channel:
        for path in UNARY:
            try:
                channel.unary_unary(path)(body(path), timeout=10, metadata=metadata)
                ended[path] = "OK"
            except grpc.RpcError as error:
                ended[path] = error.code().name
    ended[SESSION] = opened(secured.address, credentials, metadata, opening)
    return ended


def opened(
    address: str,
    credentials: Credentials,
    metadata: tuple[tuple[str, str], ...],
    opening: session_pb2.Open,
) -> str:
    """Opens a Session, and returns "OK" or how it ended."""
    shown = dict(metadata)
    hello = session_pb2.Hello(
        version=VERSION,
        authorization=shown.get(TOKEN_HEADER, ""),
        key=shown.get(KEY_HEADER, ""),
    )
    frame = session_pb2.ClientFrame(hello=hello).SerializeToString()
    try:
        with RawSession(address, credentials, hello=frame) as session:
            session.send(open=opening)
            first = session.read()
    except (OSError, EOFError):
        return "UNAVAILABLE"
    return Code(first.end.code).name if first.HasField("end") else "OK"


NAMELESS = {
    "GetTaskState",
    "WatchJobState",
    "InsertKeyValue",
    "GetKeyValue",
    "TryGetKeyValue",
    "IncrementKeyValue",
    "GetKeyValueDir",
}
NAMELESS |= {"DeleteKeyValue", "KeyValueGet", "KeyValueSet", "EndAttempt"}


def names_nobody(path: str) -> bool:
    """Tells whether a call of profiles B and D, or a launcher's, says nothing of who makes it: then
    it is made as whoever holds its key.
    """
    return not path.startswith(PROFILE_A) and path.rsplit("/", 1)[1] in NAMELESS


@pytest.mark.parametrize(
    "who", ["no certificate", "another authority", "plaintext", "no token", "an old token"]
)
def test_a_stranger_is_served_nothing(secured: Secured, security: Security, who: str) -> None:
    """Every rpc of every profile is refused, though the request is one that the victim would send,
    its key included; the job goes on.
    """
    credentials = replace(security.stranger(who), key=secured.credentials[VICTIM].key)
    opening = session_pb2.Open(process_id=VICTIM, incarnation=5)
    shown = credentials.metadata()
    ended = every_rpc(secured, credentials, shown, in_the_name_of(VICTIM, secured), opening)
    assert set(ended.values()) == ({"UNAUTHENTICATED"} if "token" in who else {"UNAVAILABLE"}), (
        ended
    )
    secured.still_serves()


@pytest.mark.parametrize(
    "who", ["no certificate", "another authority", "plaintext", "no token", "an old token"]
)
def test_no_client_of_ours_joins_as_a_stranger(
    secured: Secured, security: Security, who: str
) -> None:
    """Our own client gets an error that says why, within its time."""
    client = CoordinationClient(
        secured.address,
        VICTIM,
        timeouts=Timeouts(init_s=1),
        credentials=security.stranger(who),
    )
    with pytest.raises(
        CoordinationError, match=r"UNAUTHENTICATED|no coordinator answered"
    ) as caught:
        client.connect()
    assert not GRPC_WORDS.search(str(caught.value)), caught.value


def test_a_member_speaks_for_no_other(secured: Secured, security: Security) -> None:
    """Process 2, who has stolen an incarnation, is refused on every rpc of A, B and D, and a
    Session, in the name of process 1.
    """
    own = secured.credentials[LIAR]
    stolen = secured.clients[VICTIM]._connection._identity.incarnation
    with secured.channel(own) as channel:
        watch = coordination_pb2.WatchTasksRequest(
            incarnations=secured.stamp(LIAR), version_number=-1
        ).SerializeToString()
        listed = channel.unary_unary(PROFILE_A + "WatchTasks")(
            watch, timeout=10, metadata=own.metadata()
        )
        tasks = coordination_pb2.WatchTasksResponse.FromString(listed).task_state
        (agent,) = [task.incarnation for task in tasks if task.task_id == VICTIM]
        assert agent == secured.incarnation(VICTIM)  # so an incarnation proves nothing
    body = in_the_name_of(VICTIM, secured)
    opening = session_pb2.Open(process_id=VICTIM, incarnation=stolen)

    def unnamed(path: str) -> bytes:
        return b"" if names_nobody(path) else body(path)

    ended = every_rpc(secured, own, own.metadata(), unnamed, opening)
    refused = {
        path: code for path, code in ended.items() if path not in FOR_ALL and not names_nobody(path)
    }
    assert set(refused.values()) == {"PERMISSION_DENIED"}, refused
    assert len(refused) == len(UNARY) + 1 - len(FOR_ALL) - sum(map(names_nobody, UNARY))
    secured.still_serves()


@pytest.mark.parametrize("keyless", [False, True], ids=["a key of its own", "no key"])
def test_one_who_has_not_come_speaks_for_nobody(
    secured: Secured, security: Security, keyless: bool
) -> None:
    """A peer with certificate and token that is no process of the job is refused on every rpc of A,
    B and D, those that name nobody too.
    """
    outsider = security.member()
    metadata = outsider.metadata()[:1] if keyless else outsider.metadata()
    opening = session_pb2.Open(process_id=VICTIM, incarnation=5)
    ended = every_rpc(secured, outsider, metadata, in_the_name_of(VICTIM, secured), opening)
    assert {ended.pop(path) for path in FOR_ALL} <= {"OK", "UNAVAILABLE"}
    assert set(ended.values()) == {"PERMISSION_DENIED"}, ended
    secured.still_serves()


def test_our_client_is_fenced_as_another(secured: Secured, security: Security) -> None:
    """Our client that is given a number of another learns so, once; its owner is not disturbed."""
    client = CoordinationClient(
        secured.address, VICTIM, timeouts=Timeouts(init_s=20), credentials=security.member()
    )
    with pytest.raises(
        Fenced, match=r"PERMISSION_DENIED: process 1 is another's.*give each process a number"
    ):
        client.connect()
    secured.still_serves()


def test_an_incarnation_of_another_is_refused(secured: Secured) -> None:
    """A member that registers its own agent with the incarnation of another's does not become that
    other to profile A.
    """
    own = secured.credentials[LIAR]
    with pytest.raises(
        grpc.RpcError, match="process 2 came with the incarnation of another"
    ) as caught:
        register(secured.channel(own), own, LIAR, secured.incarnation(VICTIM))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    secured.still_serves()


SECOND_CHANNELS = [PROFILE_A + "RegisterTask", PROFILE_B + "RegisterTask", PROFILE_D + "Connect"]


@pytest.mark.parametrize("journal", [False, True], ids=["one life", "restarted with its journal"])
def test_the_second_channel_is_its_owners_too(
    security: Security, tmp_path: Path, journal: bool
) -> None:
    """No other may register an agent beside a Session, or open a Session beside an agent, though
    that channel has never been there.
    """
    arguments = (
        (*security.arguments, f"--journal={tmp_path / 'journal'}")
        if journal
        else security.arguments
    )
    service = CoordinationService.spawn(2, recoverable=True, survivable=True, arguments=arguments)
    port = int(service.address.rsplit(":", 1)[1])
    shown = [security.member() for _ in range(2)]
    liar = security.member()
    try:
        client = CoordinationClient(service.address, 0, credentials=shown[0])
        with contextlib.closing(client):
            agent = threading.Thread(
                target=register, args=(shown[1].channel(service.address), shown[1], 1, 7)
            )
            agent.start()
            client.connect()
            agent.join(20)
            if journal:
                os.kill(service.pid, signal.SIGKILL)
                service.close()
                service = CoordinationService.spawn(
                    2,
                    endpoint=Endpoint(port=port),
                    recoverable=True,
                    survivable=True,
                    arguments=arguments,
                )
            client.key_value_set("before", "the liar comes")
            with liar.channel(service.address) as channel:
                for path in SECOND_CHANNELS:
                    body = in_the_name_of(0, Secured(service.address, [], [], 0))(path)
                    with pytest.raises(grpc.RpcError) as caught:
                        channel.unary_unary(path)(body, timeout=20, metadata=liar.metadata())
                    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, path
            with RawSession(service.address, liar).open(1, 7) as session:
                assert "process 1 is another's, which has no Session now" in session.end()[1]
            register(
                shown[0].channel(service.address), shown[0], 0, 9
            )  # the owner's own agent is let in
            with contextlib.closing(
                CoordinationClient(service.address, 1, credentials=shown[1])
            ) as second:  # and the owner's own Session
                second.connect()
                together([client, second], "both")
    finally:
        service.close()


def test_a_killed_process_comes_back_later(security: Security) -> None:
    """Its next life brings another key: it waits until the former one has been silent for the
    heartbeat timeout, then it is let in.
    """
    own = security.own
    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=2), recoverable=True, arguments=security.arguments
    ) as service:
        shown = [own.token_file, own.tls_cert, own.tls_key, own.tls_ca]
        arguments = [service.address, 1, *shown]
        with Processes(program("sudden_exit").read_text(), 1, arguments=arguments) as first:
            with CoordinationClient(service.address, 0, credentials=security.member()) as onlooker:
                assert first.wait(30)[0].code == 0
                with CoordinationClient(
                    service.address, 1, timeouts=Timeouts(init_s=30), credentials=security.member()
                ) as back:
                    together([onlooker, back], "both")


def test_a_certificate_gives_a_number(security: Security, tmp_path: Path) -> None:
    """One that names processes speaks for these alone: nobody else comes first, over no channel,
    and a next life need not wait.
    """
    authority = Authority(tmp_path, "naming")
    server = authority.issue("server")
    token = security.own.token_file
    arguments = (
        f"--tls-cert={server.cert}",
        f"--tls-key={server.key}",
        f"--tls-ca={server.ca}",
        f"--token-file={token}",
    )

    def holder(name: str, *processes: int) -> Credentials:
        files = authority.issue(name, uris=[f"holdfast:process/{process}" for process in processes])
        return Credentials(token, files.cert, files.key, files.ca)

    liar = holder("liar", 2)
    host = holder("host", 0, 1)
    with CoordinationService.spawn(3, recoverable=True, arguments=arguments) as service:
        with liar.channel(service.address) as channel:  # before anybody has come
            for path in SECOND_CHANNELS:
                body = in_the_name_of(1, Secured(service.address, [], [], 0))(path)
                with pytest.raises(
                    grpc.RpcError,
                    match="process 1 is another's: the caller's certificate names 2 alone",
                ):
                    channel.unary_unary(path)(body, timeout=20, metadata=liar.metadata())
        with pytest.raises(
            Fenced, match="process 1 is another's: the caller's certificate names 2 alone"
        ):
            CoordinationClient(service.address, 1, credentials=liar).connect()
        clients = join(service.address, [host, host, liar])
        together(clients, "all")
        next_life = CoordinationClient(
            service.address,
            1,
            timeouts=Timeouts(init_s=20),
            credentials=replace(host, key="another key"),
        )
        next_life.connect()
        together([clients[0], next_life, clients[2]], "and again")
        at_once([client.shutdown for client in (clients[0], next_life, clients[2])])
        clients[1].close()


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_mtls_cert_file"), reason="jaxlib speaks mTLS from 0.12 on"
)
@pytest.mark.parametrize(
    ("first_process", "found"),
    [
        (0, "met [('from/0', 'here'), ('from/1', 'here')]"),
        pytest.param(
            1, "PERMISSION_DENIED: process", marks=pytest.mark.slow
        ),  # jaxlib asks again for half a minute
    ],
)
def test_jaxlibs_own_tls_needs_no_relay(tmp_path: Path, first_process: int, found: str) -> None:
    """Unmodified jaxlib 0.12 clients whose certificates name their processes join and meet; with
    another's number they are refused.
    """
    authority = Authority(tmp_path, "job")
    server = authority.issue("server")
    held = [
        authority.issue(f"host{number}", uris=[f"spiffe://job/holdfast/process/{number}"])
        for number in range(2)
    ]
    arguments = (f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={server.ca}")
    files = [path for each in held for path in (each.cert, each.key)]
    with CoordinationService.spawn(
        3 if first_process else 2, recoverable=True, arguments=arguments
    ) as service:
        with Processes(
            program("mutual_tls_client").read_text(),
            2,
            arguments=[service.address, first_process, server.ca, *files],
        ) as processes:
            for finished in processes.wait(60):
                assert found in finished.output, finished.output


def test_a_number_is_free_without_its_owner(security: Security) -> None:
    """After shutdown a process id may be taken by whoever comes next."""
    with CoordinationService.spawn(
        1, timeouts=ServiceTimeouts(linger_s=0), recoverable=True, arguments=security.arguments
    ) as service:
        with CoordinationClient(service.address, 0, credentials=security.member()):
            pass
        with CoordinationClient(service.address, 0, credentials=security.member()) as next_one:
            next_one.key_value_set("mine", "now")


@pytest.mark.parametrize(
    "other",
    [JobIdentity("other"), JobIdentity("job", 2), JobIdentity(num_processes=5)],
    ids=["job", "attempt", "size"],
)
def test_a_session_of_another_job_is_fenced(other: JobIdentity) -> None:
    """Another job, attempt or number of processes is Fenced, at once, in words that say whose the
    service is.
    """
    with CoordinationService.spawn(2, job=JobIdentity(name="job", attempt=1)) as service:
        client = CoordinationClient(service.address, 0, job=other)
        with pytest.raises(
            Fenced, match=r"PERMISSION_DENIED: this service coordinates .*; process 0 belongs to "
        ):
            client.connect()


def test_a_liar_on_another_host(security: Security, tmp_path: Path) -> None:
    """From another network namespace, with certificate and token of the job, process 1's number is
    as much another's as from here.
    """
    with namespaces() as network:
        server = Authority(tmp_path, "crossing")
        files = server.issue("server", network.host)
        mine = server.issue("client")
        token = security.own.token_file
        arguments = (
            f"--tls-cert={files.cert}",
            f"--tls-key={files.key}",
            f"--tls-ca={files.ca}",
            f"--token-file={token}",
        )
        shown = [Credentials(token, mine.cert, mine.key, mine.ca) for _ in range(2)]
        with CoordinationService.spawn(
            2, endpoint=Endpoint(host=network.host), recoverable=True, arguments=arguments
        ) as service:
            clients = join(service.address, shown)
            python = python_in(network.names[0], tmp_path)
            with Processes(
                program("liar").read_text(),
                1,
                arguments=[service.address, token, mine.cert, mine.key, mine.ca],
                python=python,
            ) as liar:
                (finished,) = liar.wait(60)
            assert "session PERMISSION_DENIED: process 1 is another's" in finished.output, (
                finished.output
            )
            assert "agent PERMISSION_DENIED" in finished.output, finished.output
            together(clients, "still")
            at_once([client.shutdown for client in clients])

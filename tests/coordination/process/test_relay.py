"""Relays speak for their own processes, to a secured coordinator, and end with who started them."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    CoordinatorLost,
    Credentials,
    ProcessLost,
    Relay,
    ServiceTimeouts,
    StatusClient,
    Timeouts,
)
from holdfast.coordination.names import PROFILE_A
from holdfast.proto import coordination_pb2
from tests.support.cluster import Processes, free_port
from tests.support.paths import program
from tests.support.proxy import Proxy
from tests.support.secured import Security, at_once, join, secure, together


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return secure(tmp_path_factory.mktemp("secured"))


@pytest.fixture(scope="module")
def address(security: Security) -> Iterator[str]:
    """A coordinator of 2 with mTLS and token, whose members are there and are disturbed by no
    test.
    """
    with CoordinationService.spawn(
        2, recoverable=True, survivable=True, arguments=security.arguments
    ) as service:
        clients = join(service.address, [security.member(), security.member()])
        clients[0].key_value_set("secret", "42")
        yield service.address
        together(clients, "still here")
        assert clients[1].key_value_try_get("secret") == "42"
        at_once([client.shutdown for client in clients])


def test_a_relay_speaks_for_its_own_processes_only(security: Security, address: str) -> None:
    """Through a relay for task 2, neither a Session nor a registration of task 1 passes, nor a call
    of nobody.
    """
    with Relay.spawn(address, security.member(), [2]) as relay:
        with pytest.raises(CoordinationError, match="is not of this relay, which speaks for"):
            CoordinationClient(relay.address, 1, timeouts=Timeouts(init_s=5)).connect()
        with grpc.insecure_channel(relay.address) as channel:
            registration = coordination_pb2.RegisterTaskRequest(source_task_id=1, incarnation=5)
            with pytest.raises(grpc.RpcError, match="is not of this relay, which speaks for"):
                channel.unary_unary(PROFILE_A + "RegisterTask")(
                    registration.SerializeToString(), timeout=5
                )
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(PROFILE_A + "Heartbeat")(b"\xff\xff", timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            request = coordination_pb2.TryGetKeyValueRequest(
                key="secret", incarnations=coordination_pb2.Incarnations(task_id=2)
            )
            with pytest.raises(grpc.RpcError, match="has not registered through this relay"):
                channel.unary_unary(PROFILE_A + "TryGetKeyValue")(
                    request.SerializeToString(), timeout=5
                )


def test_a_relay_passes_on_its_processes_ends(security: Security) -> None:
    """The launcher's word for a process of this host goes through, by the key that the process came
    with; for another's it does not.
    """
    with CoordinationService.spawn(2, recoverable=True, arguments=security.arguments) as service:
        first = security.member()
        second = security.member()
        with (
            Relay.spawn(service.address, second, [1]) as relay,
            StatusClient(relay.address) as launcher,
        ):
            clients = [
                CoordinationClient(service.address, 0, credentials=first),
                CoordinationClient(relay.address, 1),
            ]
            at_once([client.connect for client in clients])
            with pytest.raises(CoordinationError, match="process 0 is not of this relay"):
                launcher.report_exit(0, -9)
            launcher.report_exit(1, -9)
            with pytest.raises(ProcessLost, match=r"process 1 .*ended by signal 9"):
                clients[0].wait_at_barrier("b", 1)
            for client in clients:
                client.close()


def test_who_only_looks_needs_be_no_process_of_a_relay(security: Security) -> None:
    """Who waits for a key without a name of its own, as one that is to go to the next attempt."""
    with (
        CoordinationService.spawn(1, arguments=security.arguments) as service,
        Relay.spawn(service.address, security.member(), [0]) as relay,
        StatusClient(relay.address) as looker,
        CoordinationClient(relay.address, 0) as client,
    ):
        client.key_value_set("next", "attempt 2")
        assert looker.wait_for_key("next", timeout_s=10) == b"attempt 2"


def test_a_death_behind_a_relay_is_known_too(security: Security) -> None:
    """The relay ends its stream with the one that the process's side has closed: the process is
    lost after the grace.
    """
    arguments = (*security.arguments, "--reconnect-grace-s=0.2")
    with CoordinationService.spawn(2, recoverable=True, arguments=arguments) as service:
        first = security.member()
        second = security.member()
        with Relay.spawn(service.address, second, [1]) as relay:
            clients = [
                CoordinationClient(service.address, 0, credentials=first),
                CoordinationClient(relay.address, 1),
            ]
            at_once([client.connect for client in clients])
            clients[1].close()
            with pytest.raises(ProcessLost, match=r"process 1 .*is lost"):
                clients[0].wait_at_barrier("b", 30_000)
            clients[0].close()


def test_a_vanished_host_behind_a_relay_is_lost(
    security: Security, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay's own socket still accepts connections. That says nothing of the coordinator: it is
    lost after one heartbeat timeout, and not after those of one that stands still.
    """
    with (
        CoordinationService.spawn(
            1, timeouts=ServiceTimeouts(heartbeat_s=1), arguments=security.arguments
        ) as service,
        Proxy(service.address) as proxy,
        Relay.spawn(proxy.address, security.member(), [0]) as relay,
    ):
        client = CoordinationClient(relay.address, 0)
        client.connect()
        proxy.vanish()
        with pytest.raises(CoordinatorLost, match=f"{proxy.address} has been silent for"):
            client.blocking_key_value_get("never", 60_000)
        assert "takes connections but does not answer" not in caplog.text
        client.close()


def test_who_joins_by_a_relay_reads_what_is_behind_it(security: Security) -> None:
    """The coordinator's address and what is there; the relay's own where nobody is."""
    nobody = f"127.0.0.1:{free_port()}"
    with Relay.spawn(nobody, security.member(), [0]) as relay:
        client = CoordinationClient(relay.address, 0, timeouts=Timeouts(init_s=1))
        with pytest.raises(CoordinatorLost, match=rf"at {nobody} for .* s: nobody listens") as lost:
            client.connect()
        assert lost.value.address == nobody
    client = CoordinationClient(relay.address, 0, timeouts=Timeouts(init_s=1))
    with pytest.raises(CoordinatorLost, match=rf"at {relay.address} for .* s: nobody listens"):
        client.connect()


def test_a_relay_of_another_is_refused(security: Security, address: str) -> None:
    """A relay whose credentials are not the client's own object is another's: its agent is not let
    in beside the client.
    """
    with (
        Relay.spawn(address, security.member(), [1]) as relay,
        grpc.insecure_channel(relay.address) as channel,
    ):
        request = coordination_pb2.RegisterTaskRequest(
            incarnation=5, source_task_id=1
        ).SerializeToString()
        with pytest.raises(grpc.RpcError, match="process 1 is another's") as caught:
            channel.unary_unary(PROFILE_A + "RegisterTask")(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_relay_is_for_its_own_user(security: Security, address: str) -> None:
    """Its socket lies in a folder that no other user can enter, which goes with it; and no argument
    of its process holds a secret.
    """
    credentials = security.member()
    with Relay.spawn(address, credentials, [0]) as relay:
        path = Path(relay.address.removeprefix("unix:"))
        assert (
            path.is_socket()
            and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            and path.parent.stat().st_uid == os.getuid()
        )
        assert credentials.key not in Path(f"/proc/{relay._process.pid}/cmdline").read_text()
        assert credentials.key not in Path(f"/proc/{relay._process.pid}/environ").read_text()
    assert not path.parent.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_no_signal_to_a_group_ends_a_relay(security: Security, address: str, number: int) -> None:
    """Slurm signals whole job steps: their processes need the relay to save and leave. `close` ends
    it all the same.
    """
    with Relay.spawn(address, security.member(), [0]) as relay:
        os.kill(relay.pid, number)
        with StatusClient(relay.address) as client:
            assert client.status().num_processes == 2
    assert relay._process.returncode == 0


def test_a_relay_that_cannot_start_says_why(security: Security) -> None:
    """A credential that cannot be read is named."""
    with pytest.raises(CoordinationError, match=r"cannot read the token file /nonexistent"):
        Relay.spawn("127.0.0.1:1", Credentials("/nonexistent"), [0])


def test_a_relay_ends_with_whoever_started_it(security: Security, address: str) -> None:
    """SIGKILL of the process that started a relay leaves no relay behind."""
    own = security.own
    arguments = [address, own.token_file, own.tls_cert, own.tls_key, own.tls_ca]
    with Processes(program("relay_holder").read_text(), 1, arguments=arguments) as processes:
        processes.wait_for(0, "address unix:")
        path = processes.output(0).split()[-1].removeprefix("unix:")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.settimeout(20)
            processes.kill(0)
            while connection.recv(4096):  # until the relay has let go
                pass
        for _ in range(100):
            if not os.path.exists(os.path.dirname(path)):
                return
            threading.Event().wait(0.1)
    pytest.fail("the relay's folder is still there after 10 s")

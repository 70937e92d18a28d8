"""Where a service listens: addresses of both kinds, and one that is taken."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import CoordinationError
from holdfast.coordination.server.listening import Listening, Tls


def _bound(address: str) -> list[socket.socket]:
    found = Listening(address).bind()
    for listener in found:
        listener.listen()
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]"])
def test_a_port_is_bound_on_every_address_of_its_host(host: str) -> None:
    """At one port, which a second one is refused."""
    listeners = _bound(f"{host}:0")
    port = Listening.port_of(listeners[0])
    try:
        for listener in listeners:
            assert listener.getsockname()[1] == port
            family = listener.family
            target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(
                listener.getsockname()[0], listener.getsockname()[0]
            )
            with socket.socket(family) as connection:
                connection.connect((target, port))
        with pytest.raises(OSError, match=rf"cannot listen at .*:{port}: .*in use"):
            Listening(f"{host}:{port}").bind()
    finally:
        for listener in listeners:
            listener.close()


def test_an_address_that_this_machine_does_not_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a container without IPv6, whose /etc/hosts has `localhost` at ::1 too. One of another kind
    is left out alike; where no address can be had, the first says why.
    """
    other: Any = (socket.AF_APPLETALK, socket.SOCK_STREAM, 0, "", ("2001:db8::1", 0))
    absent: Any = (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("2001:db8::1", 0, 0, 0))
    here: Any = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [other, absent, here])
    (listener,) = Listening("localhost:0").bind()
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [absent, other])
    with pytest.raises(OSError, match=r"cannot listen at localhost:0: .*assign requested address"):
        Listening("localhost:0").bind()


def test_an_ipv4_client_reaches_all_addresses() -> None:
    """`[::]` is both kinds, as it was with gRPC."""
    (listener,) = _bound("[::]:0")
    with listener, socket.create_connection(("127.0.0.1", Listening.port_of(listener)), 20):
        pass


def test_a_path_of_a_dead_service_is_taken_over(tmp_path: Path) -> None:
    """One of a service that lives is refused, though it stands still with a full queue, and is left
    alone.
    """
    address = f"unix:{tmp_path}/socket"
    (first,) = Listening(address).bind()
    first.listen(0)
    waiting = []
    with first:
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(f"{tmp_path}/socket")
            waiting.append(client)
        with pytest.raises(OSError, match=r"cannot listen at unix:.*: somebody listens there"):
            Listening(address).bind()
    for client in waiting:
        client.close()
    (second,) = Listening(address).bind()
    second.close()
    assert (tmp_path / "socket").is_socket()


@pytest.mark.parametrize(
    "address", ["nowhere", "192.0.2.1:0", "::1:0", "unix:/nonexistent/folder/socket"]
)
def test_an_address_that_cannot_be_had_is_named(address: str) -> None:
    """An OSError with the address."""
    with pytest.raises(OSError, match=f"cannot listen at {address}: "):
        Listening(address).bind()


def test_what_is_no_file_there_is_left_alone(tmp_path: Path) -> None:
    """A file of another kind is not removed."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="cannot listen at"):
        Listening(f"unix:{tmp_path}/file").bind()
    assert (tmp_path / "file").read_text() == "mine"


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    """Before anything is bound."""
    (tmp_path / "pem").write_text("no PEM")
    file = tmp_path / "pem"
    with pytest.raises(CoordinationError, match=f"{file} and {file} are no certificate, its key"):
        Tls(file, file, file).for_sockets()

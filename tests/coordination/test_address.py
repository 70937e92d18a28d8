"""Addresses: HOST:PORT and unix:PATH."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.coordination.address import (
    address_towards,
    connect,
    join_address,
    own_host,
    split_address,
)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("host:0", ("host", 0))],
)
def test_host_and_port_are_split(address: str, parts: tuple[str, int]) -> None:
    """The brackets of an IPv6 host are not part of it, and are put back."""
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:http", "host:65536", ""])
def test_other_text_is_refused(address: str) -> None:
    """The error names the text."""
    with pytest.raises(ValueError, match=r"expected HOST:PORT"):
        split_address(address)


def test_an_ipv6_host_wants_its_brackets() -> None:
    """gRPC takes the port of another for a part of the host, and waits."""
    with pytest.raises(ValueError, match=r"'::1:80': expected .* brackets, as in '\[::1\]:80'"):
        split_address("::1:80")


def test_both_kinds_of_service_are_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A socket's path and a port; where nobody listens it is an OSError."""
    monkeypatch.chdir(tmp_path)  # the whole path may be too long for a socket's name
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(OSError):
            connect("unix:socket", 1.0)
        server.listen()
        connect("unix:socket", 1.0).close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with connect(f"127.0.0.1:{server.getsockname()[1]}", 1.0) as connection:
            assert connection.getpeername() == server.getsockname()


def test_a_service_here_is_reached_by_loopback() -> None:
    """At a Unix socket, and at loopback itself."""
    assert address_towards("unix:/some/socket") == "127.0.0.1"
    assert address_towards("127.0.0.1:1") == "127.0.0.1"


def test_a_name_that_means_loopback_is_not_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name the address 127.0.1.1: others would not come there. They are
    given the address that this machine sends from, where it has a route to others.
    """
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    try:
        expected = address_towards("192.0.2.1:9")
    except OSError:
        expected = "localhost"
    assert own_host() == expected
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.7")
    assert own_host() == "192.0.2.7"

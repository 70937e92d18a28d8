"""Which sockets are gloo's, by what gloo has published, and what becomes of all others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator

import pytest

from holdfast.multihost.start.gloo import Address, published, shut_down

HOST = ipaddress.IPv4Address("127.0.0.1")


def _value(address: bytes, host: bytes = b"vm") -> bytes:
    """Returns what gloo publishes: the host, the address, and more, the first two by length."""
    parts = [struct.pack("<Q", len(part)) + part for part in (host, address)]
    return b"".join(parts) + bytes(24)


V4 = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s", 4711, HOST.packed) + bytes(128)
V6 = (
    struct.pack("=H", socket.AF_INET6)
    + struct.pack("!H4x16s", 4711, ipaddress.IPv6Address("fd00::1").packed)
    + bytes(112)
)


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (_value(V4), Address(HOST, 4711)),
        (_value(V6), Address(ipaddress.IPv6Address("fd00::1"), 4711)),
        (_value(b"\1\0" + bytes(134)), None),  # of a Unix socket
        (_value(V4)[:60], None),
        (V4, None),
        (struct.pack("<QQ", 1 << 63, 1), None),
        (_value(b""), None),
        (b"", None),
    ],
)
def test_what_gloo_publishes_is_read_or_left(value: bytes, address: Address | None) -> None:
    """A value of another shape names no address, so that no socket is taken for gloo's."""
    assert published(value) == address


class Listener:
    """A server of this host."""

    def __init__(self, family: int = socket.AF_INET, host: str = "127.0.0.1") -> None:
        self.socket = socket.socket(family)
        self.socket.bind((host, 0))
        self.socket.listen()
        self.address = Address(HOST, self.socket.getsockname()[1])

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Returns both ends of a connection to it."""
        client = socket.create_connection((str(self.address.host), self.address.port), timeout=10)
        server, _ = self.socket.accept()
        server.settimeout(10)
        return client, server


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    """Two servers, of which the second takes IPv4 at a socket of IPv6."""
    with contextlib.ExitStack() as stack:
        both = [Listener(), Listener(socket.AF_INET6, "::")]
        for each in both:
            stack.enter_context(each.socket)
        yield both


@pytest.mark.parametrize("which", [0, 1])
def test_only_the_connections_of_an_address_end(listeners: list[Listener], which: int) -> None:
    """Both ends of it, at once; all else goes on: other connections, listeners, Unix sockets."""
    gloo = listeners[which]
    tracker = listeners[1 - which]
    with contextlib.ExitStack() as stack:
        ended = [stack.enter_context(end) for end in gloo.connect()]
        kept = [stack.enter_context(end) for end in (*tracker.connect(), *socket.socketpair())]
        shut_down([gloo.address])
        assert [end.recv(1) for end in ended] == [b"", b""]
        for one, other in (kept[:2], kept[2:]):
            one.sendall(b"x")
            assert other.recv(1) == b"x"
        for end in gloo.connect():  # it listens still
            end.close()


def test_nothing_ends_where_no_address_is_known(listeners: list[Listener]) -> None:
    """As of a key that could not be read."""
    one, other = listeners[0].connect()
    with one, other:
        shut_down([])
        one.sendall(b"x")
        assert other.recv(1) == b"x"

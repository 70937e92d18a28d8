"""Where a service listens: HOST:PORT, or unix:PATH on its own machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

UNIX = "unix:"
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1:9"  # of the addresses that are for documents: any other host
_MOST_PORT = 65_535
_MOST_MS = (1 << 31) - 1  # the kernel takes no more


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT, an IPv6 host without its brackets.

    Raises ValueError for what is no HOST:PORT, and for an IPv6 host that is in no brackets: gRPC
    takes its port for a part of it.
    """
    host, _, port = address.rpartition(":")
    if ":" in host and not host.startswith("["):
        raise ValueError(f"{address!r}: expected an IPv6 host in brackets, as in '[{host}]:{port}'")
    if not host or not port.isdecimal() or int(port) > _MOST_PORT:
        raise ValueError(f"{address!r}: expected HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns where a service at `host` is, as `split_address` takes it: an IPv6 host in brackets.
    unix:PATH has no port.
    """
    if host.startswith(UNIX):
        return host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"


def beside(address: str, name: str) -> str:
    """Returns the address of another socket in the folder of a Unix socket."""
    return f"{address.rpartition('/')[0]}/{name}"


def connect(address: str, timeout_s: float) -> socket.socket:
    """Returns a socket that is connected to HOST:PORT or unix:PATH.

    Raises OSError, and ValueError for what is no address.
    """
    if not address.startswith(UNIX):
        return socket.create_connection(split_address(address), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address.removeprefix(UNIX))
    except BaseException:
        connection.close()
        raise
    return connection


def set_silence(connection: socket.socket, silence_s: float) -> None:
    """Has TCP send at once, and end a connection whose other side acknowledges nothing for so
    long, or for 24 days. A Unix socket has neither.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        silence_ms = int(silence_s * 1000)
        most_ms = min(silence_ms, _MOST_MS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)


def address_towards(address: str) -> str:
    """Returns the address at which hosts beside a service reach this machine.

    That is loopback for a service at a Unix socket. Sends nothing. Raises OSError.
    """
    if address.startswith(UNIX):
        return _LOOPBACK
    host, port = split_address(address)
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # a datagram socket that is connected sends nothing
        probe.connect(target)
        return str(probe.getsockname()[0])


def own_host() -> str:
    """Returns the host at which others reach this machine: its name, or the address of its route
    to others where the name leads no further than loopback. So Debian's /etc/hosts has it, with
    127.0.1.1. Sends nothing to others than a name server.
    """
    name = socket.gethostname()
    if not is_loopback(name):
        return name
    # A machine without a route has no other address.
    with contextlib.suppress(OSError):
        return address_towards(_ELSEWHERE)
    return name


def is_loopback(host: str) -> bool:
    """Returns whether a host, an IPv6 one also in brackets, leads no further than loopback."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(target[0]).is_loopback for *_, target in found)

"""Where a service listens: HOST:PORT, or unix:PATH on its own machine."""

from __future__ import annotations

import socket

UNIX = "unix:"
_LOOPBACK = "127.0.0.1"


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT, an IPv6 host without its brackets.

    Raises ValueError for what is no HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r}: expected HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


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

"""Ends the collectives of gloo, by which CPU backends speak: one of them waits for ever where a
neighbour has failed and keeps its sockets.

gloo publishes at the coordinator where each process listens, under `cpu:gloo/DEVICES/PROCESS`. Both
ends of each of its connections show there: one has the address of the listener for its own. What a
process is connected to besides, such as a tracker, a data worker or a store, does not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

KEYS = "cpu:gloo"
_DESCRIPTORS = "/dev/fd"
_LENGTH = struct.Struct("<Q")
_FAMILY = struct.Struct("=H")


class Address(NamedTuple):
    """Where a socket is, as both ends see it."""

    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def published(value: bytes) -> Address | None:
    """Returns the address in what gloo publishes of a process, None where it cannot be read.

    That is the host's name and a `sockaddr_storage`, each after its length, and more.
    """
    with contextlib.suppress(struct.error):
        _, rest = _split(value)
        found, _ = _split(rest)
        return _address_in(found)
    return None


def _split(value: bytes) -> tuple[bytes, bytes]:
    """Returns what stands after its length, and the rest. Raises struct.error where it is short."""
    (length,) = _LENGTH.unpack_from(value)
    end = _LENGTH.size + length
    if len(value) < end:
        raise struct.error(f"{length} bytes in {len(value)}")
    return value[_LENGTH.size : end], value[end:]


def _address_in(found: bytes) -> Address | None:
    (family,) = _FAMILY.unpack_from(found)
    port, first, second = struct.unpack_from("!H4s16s", found, _FAMILY.size)
    if family == socket.AF_INET:
        return Address(ipaddress.IPv4Address(first), port)
    if family == socket.AF_INET6:
        return Address(ipaddress.IPv6Address(second), port)
    return None


def shut_down(addresses: Collection[Address]) -> None:
    """Shuts down this process's connections from or to one of the addresses.

    Whoever waits at one, at either end, gets an error at once.
    """
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            peer = _address(connection.getpeername())  # a listener has none, and stays
            if peer in addresses or _address(connection.getsockname()) in addresses:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """Yields the sockets of this process, each by a descriptor of its own."""
    for name in os.listdir(_DESCRIPTORS):
        # Closed meanwhile, or no socket. What it is is asked of the copy, which stays what it is.
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                raise
            yield connection


def _address(name: Any) -> Address:
    host = ipaddress.ip_address(name[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return Address(host, name[1])

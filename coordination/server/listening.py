"""Where a service listens, who is let in, and gRPC's settings, each with its reason."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from ..address import UNIX, split_address
from ..credentials import load_pem
from ..limits import Config, silence_options
from ..wire.doorway import BACKLOG

ALTERNATIVE_NAMES = "x509_subject_alternative_name"
"""The key of a call's authentication context that holds the names in the client's certificate."""

# of an address, such as ::1 of `localhost` in a container without IPv6
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_SILENT_TIMEOUTS = 4  # heartbeat timeouts: a client that waits for a stopped coordinator has three
_LEAST_SILENCE_S = 20.0
_LEAST_PENDING = 3_000
_PENDING_PER_PROCESS = 4  # jax's agent makes three calls at most at its start


@dataclass(frozen=True)
class Tls:
    """PEM files: the service's key and certificate, and the authority that its clients'
    certificates must come from.
    """

    key: Path
    certificate: Path
    authority: Path

    def for_grpc(self) -> grpc.ServerCredentials:
        """Returns what gRPC serves with."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        authority = self.authority.read_bytes()
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=True)

    def for_sockets(self) -> ssl.SSLContext:
        """Returns what Sessions are served with. Raises CoordinationError for files that are no
        PEM.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        load_pem(context, self.certificate, self.key, self.authority)
        return context


@dataclass(frozen=True)
class Listening:
    """Where to listen, who is let in, and by which clock."""

    address: str  # host:port, or unix:PATH
    tls: Tls | None = None
    token: str | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def secured(self) -> bool:
        """Returns whether strangers are kept out."""
        return self.tls is not None or self.token is not None

    def bind(self) -> list[socket.socket]:
        """Binds the address; OSError where it is taken, or is none of this machine's."""
        try:
            if self.address.startswith(UNIX):
                return [_bind_path(self.address.removeprefix(UNIX))]
            return _bind_port(*split_address(self.address))
        except (OSError, ValueError) as error:
            raise OSError(f"cannot listen at {self.address}: {error}") from None

    @staticmethod
    def port_of(listener: socket.socket) -> int:
        """Returns the port of what was bound, 0 for a path."""
        return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            found = probe.connect_ex(path)
        if found in (0, errno.EAGAIN):
            raise OSError("somebody listens there")
        if found == errno.ECONNREFUSED and Path(path).is_socket():  # of one that was killed
            Path(path).unlink()
        listener.bind(path)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_port(host: str, port: int) -> list[socket.socket]:
    """Binds every address of a host that this machine has, at one port."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    absent: list[OSError] = []
    with contextlib.ExitStack() as undo:
        listeners: list[socket.socket] = []
        for family, _, _, _, target in dict.fromkeys(found):
            address = (target[0], port, *target[2:])
            try:
                # A coordinator that was killed comes back to its port; two at once are refused.
                listener = socket.create_server(
                    address, family=family, backlog=BACKLOG, dualstack_ipv6=host == "::"
                )
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent.append(error)
                continue
            undo.enter_context(listener)
            port = int(listener.getsockname()[1])
            listener.setblocking(False)
            listeners.append(listener)
        if not listeners:
            raise absent[0]
        undo.pop_all()
    return listeners


def silence_s(config: Config) -> float:
    """Returns after how much silence a connection ends.

    Silence is for the heartbeat to decide: one that ended before would look like a death.
    """
    return max(_LEAST_SILENCE_S, _SILENT_TIMEOUTS * config.heartbeat_timeout_s)


def channel_options(config: Config) -> list[tuple[str, int]]:
    """Returns gRPC's settings for a server."""
    limits = config.limits
    pending = max(_LEAST_PENDING, _PENDING_PER_PROCESS * config.num_tasks)
    return [
        *silence_options(silence_s(config)),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", 65_536),  # a process may wait in many calls
        # Calls that come before they are taken: by default a thousand, and above that gRPC refuses
        # them. A job's processes all come at one moment.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.http2.max_pings_without_data", 0),
        # jaxlib's clients keep idle connections alive by pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", limits.idle_connection_s * 1000),
    ]

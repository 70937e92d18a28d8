"""What both transports share: where to listen, gRPC's settings (each with its reason), binding a
port.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from ..limits import Config, Limits, silence_options
from .admission import Admission

ALTERNATIVE_NAMES = "x509_subject_alternative_name"
"""The key of a call's authentication context that holds the names in the client's certificate."""

_SILENT_TIMEOUTS = 4  # heartbeat timeouts: a client that waits for a stopped coordinator has three
_LEAST_SILENCE_S = 20.0
_LEAST_PENDING = 3_000
_PENDING_PER_PROCESS = (
    4  # a process has a Session, and jax's agent three calls at most at its start
)


@dataclass(frozen=True)
class Tls:
    """PEM bytes: the service's key and certificate, and the authority that its clients'
    certificates must come from.
    """

    key: bytes
    certificate: bytes
    authority: bytes


@dataclass(frozen=True)
class Listening:
    """Where to listen, who is let in, and by which clock."""

    address: str  # host:port
    tls: Tls | None = None
    token: str | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def secured(self) -> bool:
        """Returns whether strangers are kept out."""
        return self.tls is not None or self.token is not None

    def admission(self, limits: Limits) -> Admission:
        """Returns what checks each call."""
        return Admission(self.token, limits, keys=self.secured)

    def bind(self, add_port: Callable[[grpc.ServerCredentials | None], int]) -> int:
        """Binds the port by gRPC's `add_port` and returns it; OSError where it is taken."""
        tls = self.tls
        credentials = tls and grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
        )
        try:
            port = add_port(credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {self.address}: {error}") from None
        if not port:
            raise OSError(f"cannot listen at {self.address}")
        return int(port)


def channel_options(config: Config) -> list[tuple[str, int]]:
    """Returns gRPC's settings for a server."""
    limits = config.limits
    # Silence is for the heartbeat to decide: a connection that ended before would look like a
    # death.
    silence_s = max(_LEAST_SILENCE_S, _SILENT_TIMEOUTS * config.heartbeat_timeout_s)
    pending = max(_LEAST_PENDING, _PENDING_PER_PROCESS * config.num_tasks)
    return [
        *silence_options(silence_s),
        # A second server on the port is refused; the default binds both, silently.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", 65_536),  # a process may wait in many calls
        # Calls that come before they are taken: by default a thousand, and above that gRPC refuses
        # them. A job's processes all come at one moment.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.http2.max_pings_without_data", 0),
        # Our own clients keep idle connections alive by pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", limits.idle_connection_s * 1000),
    ]

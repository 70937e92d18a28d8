"""Profile A's unary calls, as jaxlib's service and ours answer them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from holdfast.proto import coordination_pb2 as pb

from ..credentials import Credentials
from ..deadline import Deadline
from ..errors import HoldfastError
from ..limits import silence_options
from ..names import PROFILE_A
from .answers import METHODS, make_error, payloads_of

TRANSIENT = frozenset({"UNAVAILABLE", "UNKNOWN"})
"""Codes that a broken connection gives, as opposed to an answer of the service."""

_NO_ANSWER = "Deadline Exceeded"  # what gRPC itself says; a service says who is missing

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A proxy between the processes of one job is always a mistake of the environment.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # The time-out of one attempt to connect: a busy coordinator still finishes what it began.
    ("grpc.min_reconnect_backoff_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # two clients in one process share no connection
)

CHANNEL_OPTIONS = _OPTIONS + silence_options(3600.0)
"""Of a process of the job. Silence is for the heartbeat to decide, whose timeout the service says
later. A connection that ended before, in a cut of the network, would look like a death.
"""

QUERY_CHANNEL_OPTIONS = _OPTIONS + silence_options(20.0)
"""Of one that only asks: it has no heartbeat, and its next question should find a connection."""


@dataclass(frozen=True)
class Identity:
    """Who a client is: its process, its job as it knows it, and its incarnation, drawn once."""

    process_id: int
    num_processes: int | None
    job: str
    attempt: int
    host: str
    incarnation: int = field(default_factory=lambda: secrets.randbits(63) | 1)


class TransportError(HoldfastError):
    """Says that the connection failed before an answer came; `sent` is False when the request
    surely never left. Internal.
    """

    sent: bool = True


class UnaryTransport:
    """Sends unary calls over a channel of its own. Safe from several threads; `close` ends the
    calls in flight.
    """

    def __init__(self, address: str, identity: Identity, credentials: Credentials) -> None:
        self._identity = identity
        self._metadata = credentials.metadata()
        self._channel = credentials.channel(address, CHANNEL_OPTIONS)
        self._calls = {
            name: self._channel.unary_unary(
                PROFILE_A + name,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for name, method in METHODS.items()
        }
        self.heartbeat_timeout_s: float | None = None  # the service does not say
        self.service_address = address
        self._service_incarnation = 0

    def join(self, deadline: Deadline) -> None:
        """Registers and waits for all others; may be called again after a TransportError."""
        request = pb.RegisterTaskRequest(
            incarnation=self._identity.incarnation, source_task_id=self._identity.process_id
        )
        response = self.call("RegisterTask", request, deadline)
        self._service_incarnation = response.service_incarnation

    def heartbeat(self, deadline: Deadline) -> None:
        """Sends one heartbeat."""
        me = self._identity
        self.call(
            "Heartbeat",
            pb.HeartbeatRequest(incarnation=me.incarnation, source_task_id=me.process_id),
            deadline,
        )

    def call(
        self,
        method: str,
        request: Any,
        deadline: Deadline,
        grace_s: float = 0.0,
        *,
        depends_on: Sequence[int] = (),
        number: int = 0,
        participants: bytes = b"",
    ) -> Any:
        """Sends one call and returns its response; what is a Session's alone has no place in
        jaxlib's messages. Raises TransportError, or the exception for the service's answer.
        """
        if method != "RegisterTask":
            request.incarnations.CopyFrom(self._incarnations())
        timeout_s = deadline.remaining_s() - (0 if method == "Barrier" else grace_s)
        try:
            return self._calls[method](
                request, timeout=max(0.0, timeout_s), metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._error_of(error, method, request, deadline) from error
        except ValueError:  # "Cannot invoke RPC on closed channel!"
            raise TransportError("the client is closed", sent=False) from None

    def _incarnations(self) -> pb.Incarnations:
        return pb.Incarnations(
            task_id=self._identity.process_id,
            task_incarnation=self._identity.incarnation,
            service_incarnation=self._service_incarnation,
        )

    def _error_of(
        self, error: grpc.RpcError, method: str, request: Any, deadline: Deadline
    ) -> HoldfastError:
        code = error.code().name
        details = error.details() or ""
        if details == _NO_ANSWER:
            details = f"{method}: no answer within {deadline.timeout_s:g} s"
        payloads = payloads_of(error)
        # An answer of the service has payloads; what a broken connection gives has none.
        if code in TRANSIENT and not payloads:
            return TransportError(details)
        return make_error(code, details, payloads, request)

    def close(self) -> None:
        """Ends all calls in flight with TransportError and releases the connection."""
        self._channel.close()

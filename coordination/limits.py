"""Limits of a service, each with its reason, and the settings of the job that it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import click

_KIB = 1024
_MIB = 1024 * 1024
_DAY_MS = 86_400_000

HEARTBEATS_PER_TIMEOUT = 4
"""A client is heard of at least so often in one heartbeat timeout."""

RATE_WINDOW_S = 10.0
"""Over which steps per second are counted."""


class NumberRange(click.FloatRange):
    """The type of an option that is a number. FloatRange takes "nan", which is out of no range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the number. Raises BadParameter."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


@dataclass(frozen=True)
class Limits:
    """Bounds what one service holds. Past a bound a call ends with RESOURCE_EXHAUSTED; nothing
    grows without end.
    """

    tasks: int = 65_536
    """The largest job that the protocol has been seen with is about 10,000 processes."""
    key_bytes: int = 4 * _KIB
    """Keys are names. The longest that jax makes, gloo's, lists device ids: under 1 KiB at 100
    devices.
    """
    value_bytes: int = 64 * _MIB
    """jax puts topologies (a few MiB on large slices) and compiled-program caches here; one value
    never needs more.
    """
    total_bytes: int = 512 * _MIB
    """All keys and values together: the service shares a host with a trainer."""
    keys: int = 500_000
    """A key costs about 300 bytes besides its value: 150 MB at this count."""
    barrier_name_bytes: int = 4 * _KIB
    """As for keys."""
    barriers_open: int = 10_000
    """Barriers waited at: each process would have to run many at once."""
    barriers_kept: int = 10_000
    """Passed barriers whose result can be asked for again; the oldest go first."""
    alive_members: int = 131_072
    """Members, in all, of the sets whose last answer of who is alive can be asked for again: two of
    the largest job, at about 300 bytes a member.
    """
    participants: int = 1_048_576
    """Members, in all, of the sets of processes that calls send as bits, at about 60 bytes a
    member: 256 sets of 4,096.
    """
    waiters_per_task: int = 10_000
    """Calls of one task that wait at a time; each holds about 2 KiB of gRPC state."""
    host_bytes: int = 256
    """A host name has at most 253 characters."""
    events: int = 1_000
    """Kept of a job's history, at about 300 bytes each."""
    report_values: int = 64
    """Values of one progress report."""
    root_path_bytes: int = 1_024
    """Of the checkpoints that a process reports; a folder or a URL."""
    root_steps: int = 64
    """Of those, the newest, in one report."""
    root_copies: int = 8
    """Hosts of one report that have the same part of a local step."""
    root_metrics: int = 16
    """Of one of those steps."""
    metric_bytes: int = 256
    """A metric's name."""
    error_bytes: int = 2_048
    """jaxlib cuts messages at 3,072 bytes; a reported error appears inside a sentence of ours."""
    calls_per_second: int = 20_000
    """From one connection: a busy agent makes hundreds, one that floods makes more than this."""
    backlog_bytes: int = 8 * _MIB
    """A Session whose client leaves more unread is dropped."""
    under_way_bytes: int = 64 * _MIB
    """Large answers that are on their way to gRPC's clients at a time: it holds a copy of each."""
    idle_connection_s: int = 30
    """A connection that has not finished its handshake after so long is closed."""

    @property
    def message_bytes(self) -> int:
        """The largest request that is let in: the largest value, its key, and room for the
        rest.
        """
        return self.value_bytes + self.key_bytes + 64 * _KIB


@dataclass(frozen=True)
class Config:
    """The settings of one job's service."""

    num_tasks: int
    incarnation: int
    job: str = ""
    attempt: int = 0
    heartbeat_timeout_s: float = 100.0
    reconnect_grace_s: float = 5.0
    shutdown_timeout_s: float = 300.0
    recoverable: bool = False
    survivable: bool = False
    limits: Limits = field(default_factory=Limits)


def silence_options(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """Returns gRPC's settings by which a connection ends whose other side acknowledges nothing for
    `timeout_s`.
    """
    timeout_ms = min(int(timeout_s * 1000), _DAY_MS)
    return (
        # A ping a day is in fact none. With it gRPC sets TCP_USER_TIMEOUT to the next.
        ("grpc.keepalive_time_ms", _DAY_MS),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC sends pings to measure the connection, too, which a stopped process does not answer.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )

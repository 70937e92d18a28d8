"""Settings of clients and coordinators, as values: which job, where, and how long each waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class JobIdentity:
    """Which job a process belongs to. A coordinator refuses processes of another one.

    `attempt` counts the starts of the job from 0. `num_processes` is what a client expects, None
    where it does not know; `CoordinationService.spawn` has an argument of its own for it.
    """

    name: str = ""
    attempt: int = 0
    num_processes: int | None = None


@dataclass(frozen=True)
class Timeouts:
    """How long a client waits, in seconds.

    `heartbeat_s` is the silence after which a coordinator is lost: None takes the coordinator's
    own, or 100 where it does not say. `init_s` bounds the joining, `shutdown_s` the wait for the
    others at the end, and `rpc_s` the calls that are given no time-out.
    """

    heartbeat_s: float | None = None
    init_s: float = 300.0
    shutdown_s: float = 300.0
    rpc_s: float = 120.0


@dataclass(frozen=True)
class ServiceTimeouts:
    """How long a coordinator waits, in seconds.

    `heartbeat_s` is the silence after which a process is lost. `shutdown_s` is how long the first
    process that shuts down waits for the others. A coordinator ends by itself once every process
    has shut down or stayed dead for `linger_s`, or when none comes within `startup_s`; 0 means
    never. `spawn_s` bounds the wait of `CoordinationService.spawn` until the coordinator serves.
    """

    heartbeat_s: float = 100.0
    shutdown_s: float = 300.0
    linger_s: float = 60.0
    startup_s: float = 600.0
    spawn_s: float = 60.0


@dataclass(frozen=True)
class Endpoint:
    """Where a coordinator listens: an address of this machine, or unix:PATH. Port 0 is a free one.

    `advertise` is the host in the address that the coordinator prints, where others reach it by
    another name than `host`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None

    def options(self) -> Iterator[str]:
        """Yields the options of `holdfast coordinator`."""
        yield f"--host={self.host}"
        yield f"--port={self.port}"
        if self.advertise:
            yield f"--advertise={self.advertise}"

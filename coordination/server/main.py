"""The service as a process: what `holdfast coordinator` runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.machine import Machine
from ..limits import Config, Limits
from ..names import tested
from ..server import transport_aio, transport_completion_queue
from .journal import SqliteJournal
from .metrics import serve_metrics
from .service import Service
from .transports import Listening, Tls

LINGER_S = 60.0
STARTUP_TIMEOUT_S = 3_600.0
_SHUT_DOWN_GRACE_S = 1.0


@dataclass(frozen=True)
class Options:
    """What a coordinator is started with; each field is an option of `holdfast coordinator`."""

    num_processes: int
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    job: str = ""
    attempt: int = 0
    heartbeat_timeout_s: float = 100.0
    shutdown_timeout_s: float = 300.0
    recoverable: bool = False
    survivable: bool = False
    linger_s: float = LINGER_S
    startup_timeout_s: float = STARTUP_TIMEOUT_S
    public_api: bool = False  # serve over grpc.aio, whatever grpcio is installed
    journal: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    tls: Tls | None = None
    token: str | None = None
    limits: Limits = field(default_factory=Limits)


class _Ending:
    """Decides when to stop: at a signal, or when the service is over and those who ask for its end have been answered."""

    def __init__(self, service: Service, options: Options) -> None:
        self._service, self._options = service, options
        self._signalled = ""
        self._over_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signalled = signal.Signals(number).name

    def __call__(self) -> str | None:
        if self._signalled:
            return self._signalled
        reason = self._service.over(self._options.linger_s, self._options.startup_timeout_s)
        if reason is None:
            self._over_at = None
            return None
        self._over_at = self._over_at or time.monotonic()
        return reason if time.monotonic() - self._over_at >= _SHUT_DOWN_GRACE_S else None


def serve(options: Options) -> None:
    """Serves until it is over, on this thread. Prints `coordinator at HOST:PORT` once it can be reached."""
    _allow_many_connections()
    journal = None if options.journal is None else SqliteJournal(options.journal, time.monotonic)
    listening = Listening(f"{_bracketed(options.host)}:{options.port}", options.tls, options.token)
    service = Service(_machine(options, journal), listening.clock, journal, secured=listening.secured)
    ending = _Ending(service, options)
    _warn_if_open(options)
    if options.metrics_port is not None:
        service.leave_status()
        port = serve_metrics(service.status_from_thread, options.metrics_port, options.metrics_host)
        print(f"metrics at http://{_bracketed(options.metrics_host)}:{port}/metrics", file=sys.stderr, flush=True)
    if tested() and not options.public_api:
        transport = transport_completion_queue.CompletionQueueTransport(service, listening)
        announce(options, transport.bind(), journal)
        gc.freeze()  # what stands now stays: no need to look at it again and again
        gc.set_threshold(50_000, 20, 20)
        transport.serve(ending)
    else:
        asyncio.run(_serve_aio(service, listening, options, ending, journal))


def _machine(options: Options, journal: SqliteJournal | None) -> Machine:
    config = Config(
        num_tasks=options.num_processes,
        incarnation=secrets.randbits(63) | 1,
        job=options.job,
        attempt=options.attempt,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        shutdown_timeout_s=options.shutdown_timeout_s,
        recoverable=options.recoverable,
        survivable=options.survivable,
        limits=options.limits,
    )
    if journal is None:
        return Machine(config, time.monotonic())
    incarnation = journal.incarnation(config)
    return journal.open(replace(config, incarnation=incarnation or config.incarnation), incarnation)


def _allow_many_connections() -> None:
    """Lifts the soft limit of open files, often 1,024, to the hard one: each client is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _warn_if_open(options: Options) -> None:
    if options.tls is None and options.token is None and options.host not in ("127.0.0.1", "localhost", "::1", "[::1]"):
        text = f"listening at {options.host} without TLS or token: whoever reaches this port can disturb the job"
        print(f"holdfast coordinator: {text}", file=sys.stderr, flush=True)


async def _serve_aio(service: Service, listening: Listening, options: Options, ending: _Ending, journal: SqliteJournal | None) -> None:
    transport = transport_aio.AioTransport(service, listening)
    announce(options, transport.bind(), journal)
    await transport.serve(ending)


def announce(options: Options, port: int, journal: SqliteJournal | None) -> None:
    """Prints the address that others reach the service at, and writes it into the journal's lock."""
    host = options.advertise or (options.host if options.host not in ("0.0.0.0", "::", "[::]") else socket.gethostname())
    address = f"{_bracketed(host)}:{port}"
    if journal is not None:
        journal.announce(address)
    print(f"coordinator at {address}", flush=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host

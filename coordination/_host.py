"""The service as a process: what `holdfast coordinator` runs."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from . import _transport, _transport_aio
from ._limits import Limits
from ._service import Service
from ._state import Config, Machine
from ._transport_options import Listening, Tls

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
    listening = Listening(f"{_bracketed(options.host)}:{options.port}")
    service = Service(Machine(config, listening.clock()), listening.clock)
    ending = _Ending(service, options)
    if _transport.tested() and not options.public_api:
        transport = _transport.CompletionQueueTransport(service, listening)
        announce(options, transport.bind())
        transport.serve(ending)
    else:
        asyncio.run(_serve_aio(service, listening, options, ending))


async def _serve_aio(service: Service, listening: Listening, options: Options, ending: _Ending) -> None:
    transport = _transport_aio.AioTransport(service, listening)
    announce(options, transport.bind())
    await transport.serve(ending)


def announce(options: Options, port: int) -> None:
    """Prints the address that others reach the service at."""
    host = options.advertise or (options.host if options.host not in ("0.0.0.0", "::", "[::]") else socket.gethostname())
    print(f"coordinator at {_bracketed(host)}:{port}", flush=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


__all__ = ["LINGER_S", "STARTUP_TIMEOUT_S", "Options", "Tls", "serve"]

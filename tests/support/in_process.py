"""The service inside a test's own process: on a thread with a real socket, or with streams that
keep what is written.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.limits import Config
from holdfast.coordination.server.listening import Listening, Tls
from holdfast.coordination.server.service import Service
from holdfast.coordination.server.sessions import Session
from holdfast.coordination.server.transport import Transport
from holdfast.proto import session_pb2

INCARNATION = 77


@dataclass
class Served:
    """A service that runs on a thread; `stop` ends it."""

    address: str
    service: Service
    transport: Transport
    stopping: threading.Event
    thread: threading.Thread

    def stop(self) -> None:
        """Ends the service and waits for its thread."""
        self.stopping.set()
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    num_tasks: int,
    *,
    address: str = "127.0.0.1:0",
    tls: Tls | None = None,
    token: str | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Yields a service at an address, at a free port of loopback where none is given."""
    stopping = threading.Event()
    bound = threading.Event()
    listening = Listening(address, tls, token)
    service = Service(
        Machine(Config(num_tasks, INCARNATION, **settings), time.monotonic()),
        listening.clock,
        secured=listening.secured,
    )

    def reason() -> str | None:
        return "stopped" if stopping.is_set() else None

    transport = Transport(service, listening)
    port = transport.bind()

    def run() -> None:
        asyncio.run(transport.serve(reason, bound.set))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert bound.wait(20)
    served = Served(f"127.0.0.1:{port}" if port else address, service, transport, stopping, thread)
    try:
        yield served
    finally:
        served.stop()


class InMemoryStream:
    """A SessionStream that keeps what is written, and how it ended."""

    def __init__(self, key: str = "") -> None:
        self.session: Session | None = None
        self.key = key
        self.backlog_bytes = 0
        self.frames: list[session_pb2.ServerFrame] = []
        self.end: tuple[str, str] | None = None

    def bind(self, session: Session | None) -> None:
        self.session = session

    def names(self) -> Sequence[bytes]:
        return ()

    def write(self, frame: bytes, shared: bytes = b"") -> None:
        assert self.end is None, "written after its end"
        self.frames.append(session_pb2.ServerFrame.FromString(frame + shared))

    def finish(self, code: int, message: str) -> None:
        self.end = getattr(code, "name", str(code)), message

    def replies(self) -> list[session_pb2.Reply]:
        return [frame.reply for frame in self.frames if frame.HasField("reply")]

    def deltas(self) -> list[session_pb2.Delta]:
        return [frame.delta for frame in self.frames if frame.HasField("delta")]


class InMemoryWriter:
    """A ResponseWriter that keeps the response."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.timed = True
        self.outcome: tuple[str, Any] | None = None
        self.details = b""

    def names(self) -> Sequence[bytes]:
        return ()

    def succeed(self, body: bytes) -> None:
        assert self.outcome is None, "answered twice"
        self.outcome = "OK", body

    def fail(self, code: int, message: str, details: bytes) -> None:
        assert self.outcome is None, "answered twice"
        self.outcome = (getattr(code, "name", str(code)), message)
        self.details = details

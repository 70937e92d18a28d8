"""The service on its port: one asyncio loop, on one thread, for Sessions and gRPC's calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.machine import STANDSTILL_S
from ..wire.doorway import Doorway
from .admission import Admission
from .grpc_calls import GrpcCalls
from .journal import JournalError
from .listening import Listening, silence_s
from .service import Service
from .sessions import SessionStream
from .socket_stream import READ_BYTES, SocketStream

_STOP_POLL_S = 0.1
"""Between two polls of whether the service should stop."""
_CATCH_UP_S = 2.0
"""At most, after a standstill."""
_QUIET_S = 0.1
"""Without a frame or a call: then all that had arrived has been read."""
_END_S = 1.0
"""For the last answers to go out."""
OWN_FILES = 64  # the coordinator's own, with some to spare
_GUESTS = 1_024  # at a time, beside those of the job, which may all come at once
_LEAST_PASSAGES = 32  # a launcher and those who ask come by them too


class Transport:
    """Serves a Service until it is over."""

    def __init__(self, service: Service, listening: Listening) -> None:
        self._service = service
        self._listening = listening
        self._admission = Admission(listening.token, service.config.limits)
        self._tls: ssl.SSLContext | None = None
        self.inbox = memoryview(bytearray(READ_BYTES))
        self._listeners: list[socket.socket] = []
        self._streams: set[SocketStream] = set()
        self._flushing = False
        self._failure: JournalError | None = None
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def bind(self) -> int:
        """Binds the port and returns it, 0 for a Unix socket; OSError where it is taken."""
        if self._listening.tls is not None:
            self._tls = self._listening.tls.for_sockets()
        self._listeners = self._listening.bind()
        return self._listening.port_of(self._listeners[0])

    async def serve(
        self, stop_reason: Callable[[], str | None], announce: Callable[[], None] = lambda: None
    ) -> str:
        """Serves until `stop_reason()` gives one, which it returns. `announce` is called once all
        can be served. JournalError ends it at once, with no answer that the journal lacks.
        """
        service = self._service
        loop = asyncio.get_running_loop()
        calls = GrpcCalls(service, self._listening, self._admission, self._flush_soon)
        with _hidden_socket() as (path, hide):
            await calls.start(path)
            self.doorway = self._open_door(hide())
            self._set_timer()
            announce()
            while (reason := stop_reason()) is None:
                calls.turns.tick()
                service.note_turned_away(self.doorway.turned_away)
                await asyncio.sleep(_STOP_POLL_S)
                if self._failure is not None:
                    raise self._failure
            if self._timer is not None:
                self._timer.cancel()
            service.close()
            service.flush()
            self.doorway.close_port()
            deadline = loop.time() + _END_S
            while self._streams and loop.time() < deadline:
                await asyncio.sleep(0.01)
            await calls.stop(0.5)
            for stream in list(self._streams):
                stream.close()
            self.doorway.close()
            service.close_journal()
        return reason

    def _open_door(self, grpc_path: str) -> Doorway:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = self._service.config
        # Where files are a million: half a handshake of TLS takes 50 KB.
        most_guests = min(files // 4, _GUESTS + 2 * config.num_tasks)
        return Doorway(
            self._listeners,
            self._welcome,
            grpc_path,
            most_guests=most_guests,
            # Each is three descriptors; Sessions have theirs.
            most_passages=max(
                _LEAST_PASSAGES, (files - most_guests - config.num_tasks - OWN_FILES) // 3
            ),
            patience_s=config.limits.idle_connection_s,
            silence_s=silence_s(config),
        )

    # --- A StreamServer

    def _welcome(self, connection: socket.socket) -> None:
        most = self._service.config.limits.message_bytes
        self._streams.add(SocketStream(self, connection, self._tls, most))

    def admit(self, peer: Callable[[], object], authorization: str, key: str) -> None:
        self._admission.admit(peer, authorization.encode(), self._listening.clock())

    def frame(self, stream: SessionStream, body: bytes) -> None:
        self._service.stream_frame(stream, body)
        self._flush_soon()

    def closed(self, stream: SocketStream) -> None:
        self._streams.discard(stream)
        self._service.stream_closed(stream)
        self._flush_soon()

    # --- Time

    def _flush_soon(self) -> None:
        """Has all that this turn of the loop brings share one transaction of the journal."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._failure is None:
            try:
                self._service.flush()
            except JournalError as error:  # asyncio would log it, and go on
                self._failure = error
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._service.next_due()
        if due < self._due:
            self._due = due
            if self._timer is not None:
                self._timer.cancel()
            loop = asyncio.get_running_loop()
            late_s = self._listening.clock() - due
            self._timer = loop.call_later(max(0.0, -late_s), self._on_due)

    def _on_due(self) -> None:
        self._due = math.inf
        late_s = self._listening.clock() - self._service.next_due()
        if late_s > STANDSTILL_S:
            self._catching_up = asyncio.ensure_future(self._catch_up())
        elif late_s >= 0:
            self._tick()
        else:
            self._set_timer()

    async def _catch_up(self) -> None:
        """Reads what has arrived while this process stood still, before time passes: a heartbeat
        may be in it.
        """
        self._due = -math.inf  # nothing is due before that
        deadline = self._listening.clock() + _CATCH_UP_S
        calls = -1
        while calls != self._service.calls and self._listening.clock() < deadline:
            calls = self._service.calls
            await asyncio.sleep(_QUIET_S)
        self._due = math.inf
        self._tick()

    def _tick(self) -> None:
        self._service.tick()
        self._flush()


@contextlib.contextmanager
def _hidden_socket() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields a path for a Unix socket, and what takes the path away from all others once somebody
    listens there, and returns the path that is left to this process.

    So no cleaner of temporary folders finds it, and a coordinator that is killed leaves nothing.
    """
    folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
    descriptors = [os.open(folder, os.O_PATH)]
    # By the folder's descriptor: the whole path may be longer than a socket's name.
    path = f"/proc/self/fd/{descriptors[0]}/grpc"

    def hide() -> str:
        descriptors.append(os.open(path, os.O_PATH))
        os.unlink(path)
        folder.rmdir()
        return f"/proc/self/fd/{descriptors[1]}"

    try:
        yield path, hide
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

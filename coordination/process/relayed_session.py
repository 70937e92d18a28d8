"""A Session on its way through a relay: token and key go in, and then bytes are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from holdfast.proto import session_pb2

from ..address import connect, set_silence
from ..client.stream import CONNECT_S, SILENCE_S, another_program, hello_of, server_name
from ..core.status import Code
from ..limits import Limits
from ..wire.doorway import Doorway
from ..wire.frames import HEAD_BYTES, HELLO_BYTES, PREAMBLE, FrameTooLongError, framed, length_of

_PASSED_BYTES = 64 * 1024


@dataclass
class Upstream:
    """The coordinator, what it is shown, and for which processes. What is shown was read when the
    relay began: its files may be gone by now.
    """

    coordinator: str
    metadata: tuple[tuple[str, str], ...]
    tls: ssl.SSLContext | None
    process_ids: set[int] = field(default_factory=set)
    # asyncio itself does not hold a task that waits for a stream: it would be collected.
    sessions: set[asyncio.Task[None]] = field(default_factory=set)

    def refusal(self, process_id: int) -> str | None:
        """Returns why nobody here speaks for a process, None where somebody does."""
        if process_id in self.process_ids:
            return None
        return (
            f"process {process_id} is not of this relay, which speaks for"
            f" {sorted(self.process_ids)}"
        )


class _Side(NamedTuple):
    """One of the two connections of a Session through a relay."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def frame(self, most_bytes: int = HELLO_BYTES) -> bytes:
        """Reads one frame."""
        head = await self.reader.readexactly(HEAD_BYTES)
        return await self.reader.readexactly(length_of(head, most_bytes))

    def send(self, message: Message) -> None:
        """Sends one frame."""
        self.writer.write(framed(message.SerializeToString()))


class RelayedSession:
    """Passes a Session on. A guest of the relay's door until it is open."""

    def __init__(self, doorway: Doorway, upstream: Upstream, connection: socket.socket) -> None:
        self._doorway = doorway
        self._upstream = upstream
        self._task = doorway.loop.create_task(self._run(connection))
        upstream.sessions.add(self._task)
        self._task.add_done_callback(upstream.sessions.discard)
        doorway.expect(self)

    def close(self) -> None:
        """Ends it."""
        self._task.cancel()

    async def _run(self, connection: socket.socket) -> None:
        client = _Side(*await asyncio.open_connection(sock=connection))
        try:
            client.writer.write(PREAMBLE)
            await self._pass_on(client)
        except (OSError, EOFError, DecodeError, FrameTooLongError):
            pass  # either side's end is the end of the other
        finally:
            self._doorway.settle(self)
            client.writer.close()

    async def _pass_on(self, client: _Side) -> None:
        upstream = self._upstream
        hello = session_pb2.ClientFrame.FromString(await client.frame())
        opening = session_pb2.ClientFrame.FromString(await client.frame())
        if refusal := upstream.refusal(opening.open.process_id):
            _end(client, Code.PERMISSION_DENIED, refusal)
            return
        # At once: the relay's own socket accepts connections, whatever has become of the service.
        told = session_pb2.Opened(coordinator=upstream.coordinator)
        client.send(session_pb2.ServerFrame(opened=told))
        service = await self._connect()
        if service is None:
            _end(client, Code.UNIMPLEMENTED, another_program(upstream.coordinator))
            return
        try:
            service.writer.write(framed(hello_of(upstream.metadata, hello.hello.version)))
            service.send(opening)
            client.writer.write(framed(await service.frame(Limits().message_bytes)))
            self._doorway.settle(self)
            await _pass_both(client, service)
        finally:
            service.writer.close()

    async def _connect(self) -> _Side | None:
        """Connects to the coordinator, and does TLS's handshake where there is one. Returns None
        where another program answers.
        """
        address = self._upstream.coordinator
        loop = self._doorway.loop
        connection = await asyncio.to_thread(connect, address, CONNECT_S)
        connection.setblocking(False)
        set_silence(connection, SILENCE_S)
        try:
            await loop.sock_sendall(connection, PREAMBLE)
            found = await loop.sock_recv(connection, len(PREAMBLE))
            if not found:
                raise EOFError("the coordinator closed the connection without a word")
            if found != PREAMBLE:
                connection.close()
                return None
            tls = self._upstream.tls
            name = None if tls is None else server_name(address)
            streams = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=name)
        except BaseException:
            connection.close()
            raise
        return _Side(*streams)


def _end(client: _Side, code: Code, sentence: str) -> None:
    end = session_pb2.End(code=int(code), message=sentence)
    client.send(session_pb2.ServerFrame(end=end))


async def _pass_both(client: _Side, service: _Side) -> None:
    """Passes bytes on until one side has ended."""
    ways = [_pass(client, service), _pass(service, client)]
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _pass(source: _Side, sink: _Side) -> None:
    with contextlib.suppress(OSError):
        while data := await source.reader.read(_PASSED_BYTES):
            sink.writer.write(data)
            await sink.writer.drain()

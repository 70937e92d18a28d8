"""Who comes by the door of a port: Sessions, gRPC, and those who are neither."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination.wire.doorway import Doorway
from holdfast.coordination.wire.frames import PREAMBLE

_HTTP2 = b"PRI * HTTP/2.0\r\n"
_TLS = b"\x16\x03\x01\x00\x05hello"


class _Guest:
    """A Session that stays a guest."""

    def __init__(self, door: Door, connection: socket.socket) -> None:
        self._connection = connection
        door.welcomed.append(connection)
        door.doorway.expect(self)

    def close(self) -> None:
        """Closes it."""
        self._connection.close()


class Door:
    """A doorway on a loop of its own thread, before an echo at a Unix socket."""

    def __init__(self, folder: Path, **bounds: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.welcomed: list[socket.socket] = []
        self._path = str(folder / "grpc")
        self._bounds = {
            "most_guests": 100,
            "most_passages": 100,
            "patience_s": 60.0,
            "silence_s": 60.0,
        } | bounds
        self._serves = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._serves.wait(20)

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(_echo, self._path)
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self.doorway = Doorway(
            [self._listener],
            lambda connection: _Guest(self, connection),
            self._path,
            **self._bounds,
        )
        self._serves.set()
        await self.over.wait()
        self.doorway.close()
        server.close()

    def connect(self, data: bytes = b"") -> socket.socket:
        """Connects, and sends."""
        connection = socket.create_connection(("127.0.0.1", self.port), 20)
        connection.sendall(data)
        return connection

    def close(self) -> None:
        """Ends it."""
        self.loop.call_soon_threadsafe(self.over.set)
        self._thread.join(20)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 20):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.contextmanager
def opened(folder: Path, **bounds: Any) -> Iterator[Door]:
    door = Door(folder, **bounds)
    try:
        yield door
    finally:
        door.close()


def _all_of(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (more := connection.recv(1 << 20)):
        data += more
    return data


@pytest.mark.parametrize("begins", [_HTTP2, _TLS], ids=["HTTP/2", "TLS"])
def test_grpc_is_passed_on_byte_for_byte(tmp_path: Path, begins: bytes) -> None:
    """Eight mebibytes both ways, however the first four bytes arrive; and the end of one side is
    the end of the other.
    """
    sent = begins + os.urandom(8 << 20)
    with opened(tmp_path) as door, door.connect(sent[:1]) as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent[1:],))
        sender.start()
        assert _all_of(connection, len(sent)) == sent
        sender.join()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert not door.welcomed and door.doorway.turned_away == 0


def test_garbage_is_closed_at_once(tmp_path: Path) -> None:
    """And counted; so is a preamble that is nearly one."""
    with opened(tmp_path) as door:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"HFS0", os.urandom(2) + b"\x00\x00"):
            with door.connect(garbage) as connection, contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert not door.welcomed and door.doorway.turned_away == 3


@pytest.mark.parametrize("said", [b"", b"HF", PREAMBLE], ids=["nothing", "a half", "a preamble"])
def test_who_says_too_little_is_closed(tmp_path: Path, said: bytes) -> None:
    """After the door's patience, wherever it stopped."""
    with opened(tmp_path, patience_s=0.2) as door:
        with door.connect(said) as connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert door.doorway.turned_away == 1


def test_the_oldest_guest_goes_first(tmp_path: Path) -> None:
    """Where more come than the door takes, a newcomer finds room."""
    with opened(tmp_path, most_guests=3) as door, contextlib.ExitStack() as stack:
        guests = [stack.enter_context(door.connect()) for _ in range(5)]
        for guest in guests[:2]:
            assert guest.recv(1) == b""
        newcomer = stack.enter_context(door.connect(PREAMBLE))
        assert guests[2].recv(1) == b""
        guests[4].settimeout(0.2)
        with pytest.raises(TimeoutError):
            guests[4].recv(1)
        assert door.doorway.turned_away == 3 and newcomer.fileno() >= 0


def test_passages_are_bounded(tmp_path: Path) -> None:
    """One too many is closed, those that are open go on; when one ends there is room again."""
    with opened(tmp_path, most_passages=1) as door:
        with door.connect(_HTTP2) as first:
            assert _all_of(first, len(_HTTP2)) == _HTTP2
            with door.connect(_HTTP2) as second, contextlib.suppress(ConnectionResetError):
                assert second.recv(1) == b""
            first.sendall(b"more")
            assert _all_of(first, 4) == b"more"
        while True:
            with door.connect(_HTTP2) as third, contextlib.suppress(ConnectionResetError):
                if _all_of(third, len(_HTTP2)) == _HTTP2:
                    break

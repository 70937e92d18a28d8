"""Bytes at a coordinator's door: the real doorway, streams and service, over sockets."""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.server.listening import Listening
from holdfast.coordination.server.service import Service
from holdfast.coordination.server.transport import Transport
from holdfast.coordination.wire.frames import PREAMBLE, VERSION, FrameReader, framed
from holdfast.proto import session_pb2

from .coordinator import CONFIG, bytes_of, request_of, sessions

_GUESTS = 4
_TURNS = 4  # of the loop: accepted, admitted, answered, flushed
_MOST_STEPS = 100
_TOKEN = "a long enough token"


def run(data: bytes) -> None:
    """Runs a program, a JSON list of steps, and raises where the service met a defect, or answers
    what is no frame.

    Steps: ["bytes", guest, text], ["frame", guest, ClientFrame], ["close", guest], and ["request",
    guest, method, message, Request's fields].
    """
    try:
        steps = json.loads(data)
    except (ValueError, RecursionError):
        return
    _loop().run_until_complete(_play(steps if isinstance(steps, list) else []))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class _Guest:
    """A client of bytes, that reads all that it is sent."""

    def __init__(self, path: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.setblocking(False)
        self.connection.connect(path)
        self._greeting = b""
        self._frames = FrameReader()

    def send(self, data: bytes) -> None:
        try:
            self.connection.send(data)
        except OSError:  # it was closed, or reads no more
            return

    def read(self) -> None:
        """Reads what has come; raises where it is not as the wire is."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            return
        missing = len(PREAMBLE) - len(self._greeting)
        self._greeting += data[:missing]
        assert PREAMBLE.startswith(self._greeting), self._greeting
        self._frames.feed(data[missing:])
        while (frame := self._frames.take(1 << 30)) is not None:
            session_pb2.ServerFrame.FromString(frame)


async def _play(steps: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    defects: list[Any] = []
    loop.set_exception_handler(lambda _, context: defects.append(context))
    service = Service(Machine(CONFIG, 0.0), lambda: 1.0, secured=True)
    path = str(_folder() / "door")
    transport = Transport(service, Listening(f"unix:{path}", token=_TOKEN, clock=lambda: 1.0))
    transport.bind()
    transport.doorway = transport._open_door(str(_folder() / "nobody"))
    guests: dict[int, _Guest] = {}
    try:
        for step in steps[:_MOST_STEPS]:
            await _take(step, guests, path)
            assert not defects and not service.status().defects, (defects, service.status().defects)
    finally:
        for guest in guests.values():
            guest.connection.close()
        for stream in list(transport._streams):
            stream.close()
        transport.doorway.close()
        if transport._timer is not None:
            transport._timer.cancel()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        Path(path).unlink()
    assert not defects, defects


async def _take(step: Any, guests: dict[int, _Guest], path: str) -> None:
    match step:
        case ["bytes", int(who), str(text)]:
            data: bytes | None = text.encode("latin-1", "replace")
        case ["frame", int(who), fields]:
            body = bytes_of(session_pb2.ClientFrame, fields)
            data = None if body is None else framed(body)
        case ["request", int(who), str(method), fields, dict(more)]:
            body = request_of(method, fields, more)
            data = None if body is None else framed(body)
        case ["close", int(who)]:
            data = None
        case _:
            return
    number = who % _GUESTS
    if not data:
        gone = guests.pop(number, None)
        if gone is not None:
            gone.connection.close()
    else:
        if number not in guests:
            guests[number] = _Guest(path)
        guests[number].send(data)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    for guest in guests.values():
        guest.read()


def seeds() -> list[bytes]:
    """Returns programs: three processes that are let in and call each rpc once, frames in pieces,
    and what is no Session.
    """
    greeting = PREAMBLE.decode()
    hello = {"hello": {"version": VERSION, "authorization": f"Bearer {_TOKEN}", "key": "k"}}
    opened = [["bytes", who, greeting] for who in range(3)]
    opened += [["frame", who, hello] for who in range(3)]
    whole = bytes_of(session_pb2.ClientFrame, hello)
    assert whole is not None
    pieces = [["bytes", 0, byte] for byte in (greeting + framed(whole).decode("latin-1"))]
    strangers = [
        ["bytes", 0, "GET "],
        ["bytes", 1, "PRI * HTTP/2"],
        ["bytes", 2, "\x16\x03\x01\x00"],
    ]
    steps = list(sessions())
    programs = [opened + steps[:3] + steps[at : at + 3] for at in range(3, len(steps), 3)]
    return [json.dumps(each).encode() for each in (*programs, pieces, strangers)]

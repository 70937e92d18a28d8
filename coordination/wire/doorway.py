"""The door of a port that serves Sessions and gRPC: who comes, and by which of the two.

A connection whose first bytes are a Session's goes to `welcome`. One that speaks HTTP/2 or TLS is
passed on, byte for byte, to a gRPC server at a Unix socket. All else is closed. Guests, which have
not said who they are, have a limited time, and are a limited number.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from ..address import set_silence
from .frames import PREAMBLE

_AT_ONCE = 16
"""Connections that are accepted before others are served."""
BACKLOG = 4_096
_SWEEP_S = 1.0
_PAUSE_S = 0.1
_PASSED_BYTES = 64 * 1024
_HTTP2 = b"PRI "
_TLS_HANDSHAKE = 0x16
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Guest(Protocol):
    """A connection."""

    def close(self) -> None: ...


class Doorway:
    """Takes the connections of `listeners` on the running loop.

    `welcome` gets a Session's socket, without the preamble, and `expect`s what it makes of it;
    `settle` says that a guest is known, or gone. `turned_away` counts those that were closed.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        welcome: Callable[[socket.socket], object],
        grpc_path: str,
        *,
        most_guests: int,
        most_passages: int,
        patience_s: float,
        silence_s: float,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.turned_away = 0
        self.grpc_path = grpc_path
        self.welcome = welcome
        self._listeners = listeners
        self._most_guests = most_guests
        self._most_passages = most_passages
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._guests: dict[Guest, float] = {}  # since when; the oldest first
        self._passages: set[Passage] = set()
        for listener in listeners:
            # asyncio's own server would accept as many at a time as may wait.
            listener.listen(BACKLOG)
            self._listen(listener)
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR and not self._turn_oldest_away():
                    # Until somebody leaves; the kernel keeps them waiting.
                    self.loop.remove_reader(listener)
                    self.loop.call_later(_PAUSE_S, self._listen, listener)
                return
            connection.setblocking(False)
            set_silence(connection, self._silence_s)
            _Stranger(self, connection)

    def expect(self, guest: Guest) -> None:
        """Counts a guest, until `settle`."""
        self._guests[guest] = self.loop.time()
        if len(self._guests) > self._most_guests:
            self._turn_oldest_away()

    def settle(self, guest: Guest) -> None:
        """Counts a guest no longer."""
        self._guests.pop(guest, None)

    def refuse(self, guest: Guest) -> None:
        """Counts as turned away what was a guest until now."""
        if self._guests.pop(guest, None) is not None:
            self.turned_away += 1

    def turn_away(self, guest: Guest) -> None:
        """Closes a connection, and counts it."""
        self.refuse(guest)
        guest.close()

    def _turn_oldest_away(self) -> bool:
        for guest in self._guests:
            self.turn_away(guest)
            return True
        return False

    def _sweep(self) -> None:
        late = self.loop.time() - self._patience_s
        for guest in [guest for guest, since in self._guests.items() if since <= late]:
            self.turn_away(guest)
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    def enter(self, connection: socket.socket, head: bytes) -> None:
        """Passes a connection on to gRPC."""
        passage = Passage(self.loop, connection, self._passages)
        self.expect(passage)
        if len(self._passages) < self._most_passages:
            self._pass_on(passage, head)
        else:
            self.turn_away(passage)

    def _pass_on(self, passage: Passage, head: bytes) -> None:
        if passage not in self._guests:
            return  # it was closed meanwhile
        try:
            passage.begin(self.grpc_path, head)
        except BlockingIOError:  # gRPC has yet to accept those before
            self.loop.call_later(_PAUSE_S, self._pass_on, passage, head)
        except OSError:
            self.turn_away(passage)
        else:
            self.settle(passage)

    def close_port(self) -> None:
        """Takes nobody any more."""
        self._sweeper.cancel()
        for listener in self._listeners:
            self.loop.remove_reader(listener)
            listener.close()
        self._listeners = ()

    def close(self) -> None:
        """Ends what is left."""
        self.close_port()
        for guest in [*self._guests, *self._passages]:
            guest.close()


class _Stranger:
    """A connection whose first bytes have yet to come."""

    def __init__(self, doorway: Doorway, connection: socket.socket) -> None:
        self._doorway = doorway
        self._connection = connection
        self._head = b""
        doorway.expect(self)
        doorway.loop.add_reader(connection, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self._connection.recv(len(PREAMBLE) - len(self._head))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._head += data
        if not data:
            self.close()
        elif len(self._head) == len(PREAMBLE):
            self._enter()

    def _enter(self) -> None:
        doorway = self._doorway
        if self._head not in (PREAMBLE, _HTTP2) and self._head[0] != _TLS_HANDSHAKE:
            doorway.turn_away(self)
            return
        doorway.loop.remove_reader(self._connection)
        doorway.settle(self)
        if self._head == PREAMBLE:
            doorway.welcome(self._connection)
        else:
            doorway.enter(self._connection, self._head)

    def close(self) -> None:
        """Closes the connection."""
        self._doorway.settle(self)
        self._doorway.loop.remove_reader(self._connection)
        self._connection.close()


class Passage:
    """A connection that is passed on, byte for byte in both directions, until both are over."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, passages: set[Passage]
    ) -> None:
        self.loop = loop
        self._outer = connection
        self._inner = socket.socket(socket.AF_UNIX)
        self._inner.setblocking(False)
        self._inner.bind(b"")  # a name of its own: gRPC tells its peers apart by it
        self._passages = passages
        self._open = 2

    def begin(self, path: str, head: bytes) -> None:
        """Begins to pass, with what has been read. Raises OSError."""
        self._inner.connect(path)
        self._passages.add(self)
        _Flow(self, self._outer, self._inner, head)
        _Flow(self, self._inner, self._outer, b"")

    def end(self, sink: socket.socket) -> None:
        """Says that one direction is over."""
        self._open -= 1
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._open = 0
        if self._open <= 0:
            self.close()

    def close(self) -> None:
        """Closes both connections."""
        self._passages.discard(self)
        for side in (self._outer, self._inner):
            if side.fileno() >= 0:
                self.loop.remove_reader(side)
                self.loop.remove_writer(side)
                side.close()


class _Flow:
    """One direction of a passage. Nothing is read while something waits to be written."""

    __slots__ = ("_passage", "_rest", "_sink", "_source")

    def __init__(
        self, passage: Passage, source: socket.socket, sink: socket.socket, head: bytes
    ) -> None:
        self._passage = passage
        self._source = source
        self._sink = sink
        self._rest = memoryview(head)
        passage.loop.add_reader(source, self._on_readable)
        if head:
            self._write()

    def _on_readable(self) -> None:
        try:
            self._rest = memoryview(self._source.recv(_PASSED_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._passage.close()
            return
        if self._rest:
            self._write()
        else:
            self._passage.loop.remove_reader(self._source)
            self._passage.end(self._sink)

    def _write(self) -> None:
        try:
            self._rest = self._rest[self._sink.send(self._rest) :]
        except BlockingIOError:
            pass
        except OSError:
            self._passage.close()
            return
        if self._rest:
            self._passage.loop.remove_reader(self._source)
            self._passage.loop.add_writer(self._sink, self._on_writable)

    def _on_writable(self) -> None:
        self._passage.loop.remove_writer(self._sink)
        self._passage.loop.add_reader(self._source, self._on_readable)
        self._write()

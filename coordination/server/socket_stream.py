"""A Session's connection, on the service's loop: frames in, frames out.

What is to be written waits as references: a value that thousands wait for is one copy, however few
of them read. With TLS a piece of it is encrypted once the kernel has taken the piece before.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from holdfast.proto import session_pb2

from ..core.status import Code
from ..wire.doorway import Doorway
from ..wire.frames import (
    HELLO_BYTES,
    ONE_VERSION,
    PREAMBLE,
    VERSION,
    FrameReader,
    FrameTooLongError,
    head_of,
)
from ..wire.tls import STEP_BYTES, TlsBytes
from .admission import CallRefused
from .sessions import Session, SessionStream

READ_BYTES = 256 * 1024
_COPIED_BYTES = 16 * 1024
"""A message of so many bytes is sent as one piece."""
LEAVE_S = 2.0
"""A stream that ends is closed once its client has read nothing for so long."""


class StreamServer(Protocol):
    """What a stream tells of itself. `inbox` has READ_BYTES, for all streams in turns."""

    doorway: Doorway
    inbox: memoryview

    def admit(self, peer: Callable[[], object], authorization: str, key: str) -> None:
        """Raises CallRefused."""

    def frame(self, stream: SessionStream, body: bytes) -> None:
        """Takes a frame."""

    def closed(self, stream: SocketStream) -> None:
        """Takes the end of a connection."""


class SocketStream:
    """A SessionStream over a socket that does not block."""

    def __init__(
        self,
        server: StreamServer,
        connection: socket.socket,
        tls: ssl.SSLContext | None,
        message_bytes: int,
    ) -> None:
        self.session: Session | None = None
        self.key = ""
        self._server = server
        self._loop = server.doorway.loop
        self._connection = connection
        self._tls = None if tls is None else TlsBytes(tls)
        self._message_bytes = message_bytes
        self._most_bytes = HELLO_BYTES  # of a frame, until a Session is open
        self._reader = FrameReader()
        self._admitted = False
        self._ending = False
        self._waits_to_write = False
        # Of one or two: a deque has room for 64, and there are thousands of streams.
        self._pieces = [memoryview(PREAMBLE)]  # as they are sent
        self._message: list[memoryview] = []  # what is left of the one that is on its way
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._leave_at = 0.0
        server.doorway.expect(self)
        self._loop.add_reader(connection, self._on_readable)
        self._send()

    def bind(self, session: Session | None) -> None:
        self.session = session
        if session is not None:
            self._most_bytes = self._message_bytes
            self._server.doorway.settle(self)

    def names(self) -> Sequence[bytes]:
        """Returns the alternative names in the client's certificate."""
        return () if self._tls is None else self._tls.names()

    @property
    def backlog_bytes(self) -> int:
        """The bytes that wait behind the message that is on its way."""
        return self._queued_bytes

    # --- Frames in

    def _on_readable(self) -> None:
        inbox = self._server.inbox
        try:
            nbytes = self._connection.recv_into(inbox)
        except BlockingIOError:
            return
        except OSError:
            nbytes = 0
        if not nbytes:
            self.close()
        elif not self._ending:
            self._take(inbox[:nbytes])

    def _take(self, data: bytes | memoryview) -> None:
        try:
            if self._tls is not None:
                data = self._tls.receive(data)
                self._send_handshake()
            self._reader.feed(data)
            while not self._ending and (frame := self._reader.take(self._most_bytes)) is not None:
                if self._admitted:
                    self._server.frame(self, frame)
                else:
                    self._admit(frame)
            if self._tls is not None and self._tls.ended:
                self.close()
        except ssl.SSLError:
            self._server.doorway.turn_away(self)
        except FrameTooLongError as error:
            self.finish(Code.INVALID_ARGUMENT, str(error))

    def _send_handshake(self) -> None:
        assert self._tls is not None
        if output := self._tls.output():
            self._pieces.append(memoryview(output))
            self._send()

    def _admit(self, frame: bytes) -> None:
        """Takes the first frame. Nothing has been touched before it is found good."""
        try:
            first = session_pb2.ClientFrame.FromString(frame)
        except DecodeError:
            self.finish(Code.INVALID_ARGUMENT, "the frame is not a ClientFrame")
            return
        if not first.HasField("hello"):
            self.finish(Code.FAILED_PRECONDITION, "a Session's first frame is Hello")
            return
        hello = first.hello
        if hello.version != VERSION:
            sentence = (
                f"this coordinator speaks version {VERSION} of holdfast's Session, the process"
                f" version {hello.version}: {ONE_VERSION}"
            )
            self.finish(Code.FAILED_PRECONDITION, sentence)
            return
        try:
            self._server.admit(self._connection.getpeername, hello.authorization, hello.key)
        except CallRefused as refused:
            self.finish(refused.code, str(refused))
            return
        self.key = hello.key
        self._admitted = True

    # --- Frames out

    def write(self, frame: bytes, shared: bytes = b"") -> None:
        if not self._ending:
            self._put(frame, shared)

    def _put(self, frame: bytes, shared: bytes) -> None:
        self._queue.append((frame, shared))
        self._queued_bytes += len(frame) + len(shared)
        if not self._waits_to_write:
            self._send()

    def _send(self) -> None:
        """Sends until the kernel takes no more."""
        try:
            while self._pieces or self._encrypt_next():
                piece = self._pieces[0]
                sent = self._connection.send(piece)
                if sent == len(piece):
                    self._pieces.pop(0)
                else:
                    self._pieces[0] = piece[sent:]
                self._leave_at = self._loop.time() + LEAVE_S
        except BlockingIOError:
            if not self._waits_to_write:
                self._waits_to_write = True
                self._loop.add_writer(self._connection, self._on_writable)
        except OSError:
            self.close()
        else:
            if self._ending:
                self._shut_down()

    def _on_writable(self) -> None:
        self._waits_to_write = False
        self._loop.remove_writer(self._connection)
        self._send()

    def _encrypt_next(self) -> bool:
        """Makes a piece of what waits; returns False where nothing does."""
        if not self._message:
            if not self._queue:
                return False
            self._begin_message()
        piece = self._message.pop(0)
        if self._tls is None:
            self._pieces.append(piece)
            return True
        if len(piece) > STEP_BYTES:
            self._message.insert(0, piece[STEP_BYTES:])
        self._tls.write(piece[:STEP_BYTES])
        self._pieces.append(memoryview(self._tls.output()))
        return True

    def _begin_message(self) -> None:
        frame, shared = self._queue.popleft()
        nbytes = len(frame) + len(shared)
        self._queued_bytes -= nbytes
        head = head_of(nbytes) + frame
        if nbytes <= _COPIED_BYTES:
            self._message.append(memoryview(head + shared))
        else:
            self._message.extend((memoryview(head), memoryview(shared)))

    # --- The end

    def finish(self, code: int, message: str) -> None:
        if self._ending:
            return
        self._server.doorway.refuse(self)
        unread = bool(self._pieces or self._message)
        never_opened = self._tls is not None and not self._tls.open
        if never_opened or (unread and code == Code.RESOURCE_EXHAUSTED):
            # A client that does not read never comes to the end of what waits for it.
            self.close()
            return
        self._ending = True
        end = session_pb2.End(code=int(code), message=message)
        self._leave_at = self._loop.time() + LEAVE_S
        self._loop.call_later(LEAVE_S, self._leave)
        self._put(session_pb2.ServerFrame(end=end).SerializeToString(), b"")

    def _shut_down(self) -> None:
        """Lets the client read all, and close: what it still sends is thrown away meanwhile, since
        a connection that is closed with bytes unread takes back what the client has yet to read.
        """
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def _leave(self) -> None:
        left_s = self._leave_at - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._leave)
        else:
            self.close()

    def close(self) -> None:
        """Closes the connection. The service hears of it later: it may be in the middle of what the
        end changes.
        """
        if self._connection.fileno() < 0:
            return
        self._ending = True
        self._server.doorway.settle(self)
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._queue.clear()
        self._pieces.clear()
        self._message.clear()
        self._queued_bytes = 0
        self._loop.call_soon(self._server.closed, self)

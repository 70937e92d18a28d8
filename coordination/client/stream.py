"""The client's connection of a Session: one socket, a thread that reads, and whoever calls sends.

The reader connects, too: it can be left alone where a caller's time is over. What may block, such
as a listener, runs on a second thread.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable

from holdfast.proto import session_pb2

from ..address import UNIX, set_silence, split_address
from ..deadline import Deadline
from ..names import KEY_HEADER, TOKEN_HEADER
from ..wire.frames import PREAMBLE, VERSION, FrameReader, framed
from ..wire.tls import STEP_BYTES, TlsBytes

CONNECT_S = 20.0
"""Of one attempt to connect: a busy coordinator still finishes what it began."""
SILENCE_S = 3_600.0
"""Silence is for the heartbeat to decide, whose timeout the service says later. A connection that
ended before, in a cut of the network, would look like a death.
"""
_READ_BYTES = 256 * 1024
_LOOK_S = 0.1
"""A caller that waits for another to send looks so often whether the stream is over."""
_MOST_POLL_S = 86_400.0
_MOST_BYTES = (1 << 32) - 1  # whatever the service answers

OnFrame = Callable[[bytes], None]
OnEnd = Callable[[str, str], None]


class Stream:
    """One life of a Session's connection. Safe from several threads.

    `on_frame` and `on_end` are called by the reader, from `start` on, `on_end` once and last. They
    must not block: what may block goes to `later`.
    """

    def __init__(
        self,
        address: str,
        hello: bytes,
        context: ssl.SSLContext | None,
        on_frame: OnFrame,
        on_end: OnEnd,
    ) -> None:
        self._address = address
        self._hello = hello
        self._context = context
        self._on_frame = on_frame
        self._on_end = on_end
        self._socket = socket.socket()  # until there is one that connects
        self._writable = select.poll()
        self._inbox = memoryview(bytearray(_READ_BYTES))  # the reader's
        self._tls: TlsBytes | None = None
        self._tls_lock = threading.Lock()  # never held while something blocks
        self._sending = threading.Lock()
        self._life_lock = threading.Lock()
        self._over = False
        self._end = ("UNAVAILABLE", "the connection was closed")
        self._own: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self, opening: bytes, deadline: Deadline) -> None:
        """Connects and begins to read. `opening` is the frame after Hello."""
        read = threading.Thread(
            target=self._read, args=(opening, deadline), name="holdfast-reader", daemon=True
        )
        try:
            read.start()
        except RuntimeError:
            self._socket.close()
            raise
        threading.Thread(target=self._keep, name="holdfast-session", daemon=True).start()

    # --- Callers

    def send(self, frame: bytes, until: float) -> bool:
        """Sends a frame; returns False where nothing of it was sent by `until`.

        Where part of it was, or an exception such as Ctrl-C's comes in between, the stream ends.
        """
        try:
            return self._send(memoryview(framed(frame)), until)
        except BaseException as error:
            self.end()
            if isinstance(error, (OSError, ValueError)):
                return True  # the reader sees the end too, and says why
            raise

    def _send(self, data: memoryview, until: float) -> bool:
        left_s = max(0.0, until - time.monotonic())
        while not self._sending.acquire(timeout=min(left_s, _LOOK_S)):
            left_s = max(0.0, until - time.monotonic())
            if self._over:
                return True  # its end answers whoever waits
            if not left_s:
                return False
        try:
            return self._send_alone(data, until)
        finally:
            self._sending.release()

    def _send_alone(self, data: memoryview, until: float) -> bool:
        begun = False
        while data:
            # What has been encrypted has to be sent.
            if self._tls is not None and not begun and not self._can_send(until):
                return False
            rest = data if self._tls is None else self._encrypted(data[:STEP_BYTES])
            data = data[len(data) if self._tls is None else STEP_BYTES :]
            while rest:
                try:
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
                    begun = True
                except BlockingIOError:
                    if not self._can_send(until):
                        if begun:
                            self.end()
                        return begun
        return True

    def _can_send(self, until: float) -> bool:
        """Waits until the connection takes bytes, or is over; returns False after `until`."""
        left_s = min(max(0.0, until - time.monotonic()), _MOST_POLL_S)
        return bool(self._writable.poll(left_s * 1000))

    def _encrypted(self, piece: memoryview) -> memoryview:
        assert self._tls is not None
        with self._tls_lock:
            self._tls.write(piece)
            return memoryview(self._tls.output())

    def later(self, call: Callable[[], None]) -> None:
        """Has the stream's own thread make a call, after all earlier ones."""
        self._own.put(call)

    def end(self, code: str = "", details: str = "") -> None:
        """Ends the stream; `on_end` follows, with a code where there is one."""
        if code:
            self._end = (code, details)
        with self._life_lock:
            self._over = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Closes the descriptor in a forked child, which sends nothing."""
        self._socket.close()

    # --- The reader

    def _read(self, opening: bytes, deadline: Deadline) -> None:
        try:
            self._connect(deadline)
            self._greet(opening)
            frames = FrameReader()
            while data := self._receive():
                frames.feed(data)
                while (frame := frames.take(_MOST_BYTES)) is not None:
                    self._on_frame(frame)
        except Exception as error:  # of the connection, or a frame that is none
            if not self._over:
                self._end = ("UNAVAILABLE", f"{error}")
        self.end()
        self._on_end(*self._end)
        self._own.put(None)
        # A sender that was interrupted may keep the lock; all others are soon out.
        if self._sending.acquire(timeout=1.0):
            self._sending.release()
        self._socket.close()

    def _connect(self, deadline: Deadline) -> None:
        """Tries each address of the host: one that is silent leaves the others their share."""
        if self._address.startswith(UNIX):
            self._try(socket.AF_UNIX, self._address.removeprefix(UNIX), CONNECT_S)
            return
        host, port = split_address(self._address)
        failure: OSError | None = None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for tried, (family, _, _, _, target) in enumerate(found):
            share_s = deadline.remaining_s() / (len(found) - tried)
            try:
                self._try(family, target, min(CONNECT_S, share_s))
            except OSError as error:
                failure = error
            else:
                return
        raise failure or OSError(f"{self._address} has no address")

    def _try(self, family: int, target: object, timeout_s: float) -> None:
        with self._life_lock:
            if self._over:
                raise OSError("the client ends")
            self._socket.close()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._writable = select.poll()
            self._writable.register(self._socket, select.POLLOUT)
        set_silence(self._socket, SILENCE_S)
        self._socket.settimeout(timeout_s)
        self._socket.connect(target)  # type: ignore[arg-type]
        self._socket.settimeout(None)

    def _greet(self, opening: bytes) -> None:
        """Exchanges preambles and, where there is TLS, does its handshake; sends Hello and Open."""
        first = framed(self._hello) + framed(opening)
        if self._context is None:
            self._socket.sendall(PREAMBLE + first)
            self._check_preamble()
            return
        self._socket.sendall(PREAMBLE)
        self._check_preamble()
        tls = TlsBytes(self._context, server_name=server_name(self._address))
        while not tls.open:
            self._socket.sendall(tls.output())
            if not (data := self._socket.recv(_READ_BYTES)):
                raise OSError("the connection was closed in the handshake of TLS")
            tls.receive(data)
        tls.write(first)
        self._socket.sendall(tls.output())
        self._tls = tls

    def _check_preamble(self) -> None:
        found = b""
        while len(found) < len(PREAMBLE):
            if not (data := self._socket.recv(len(PREAMBLE) - len(found))):
                raise OSError("the connection was closed without a word")
            found += data
        if found != PREAMBLE:
            self.end("UNIMPLEMENTED", another_program(self._address))
            raise OSError

    def _receive(self) -> bytes | memoryview:
        """Returns what has arrived, nothing at the end."""
        # Into one buffer: a large one that is made for each read is mapped and unmapped each time.
        while nbytes := self._socket.recv_into(self._inbox):
            arrived = self._inbox[:nbytes]
            if self._tls is None:
                return arrived
            with self._tls_lock:
                data = self._tls.receive(arrived)
            if data or self._tls.ended:
                return data
        return b""

    # --- The stream's own thread

    def _keep(self) -> None:
        """Makes the calls left for later, until the stream is over."""
        while (call := self._own.get()) is not None:
            call()


def server_name(address: str) -> str:
    """Returns the name that the certificate at an address has to hold."""
    return "localhost" if address.startswith(UNIX) else split_address(address)[0]


def another_program(address: str) -> str:
    """Returns what is said of an address where somebody else answers."""
    return (
        f"what listens at {address} speaks no Session of this holdfast (version {VERSION}): it is a"
        f" coordinator of an older holdfast, or another program"
    )


def hello_of(metadata: Iterable[tuple[str, str]], version: int = VERSION) -> bytes:
    """Returns the first frame of a process that shows what its credentials' metadata holds."""
    shown = dict(metadata)
    hello = session_pb2.Hello(
        version=version,
        authorization=shown.get(TOKEN_HEADER, ""),
        key=shown.get(KEY_HEADER, ""),
    )
    return session_pb2.ClientFrame(hello=hello).SerializeToString()

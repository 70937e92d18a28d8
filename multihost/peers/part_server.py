"""Serves the parts of a process, and the files that they name, to the other processes of its job:
over TCP, a thread a connection.

Where the job has certificates it is TLS (peer_tls.py). Who connects first proves to know the job's
secret, and is shown the same. Then it asks, any number of times, one after the other, for so many
bytes of a part's text, of a file or of a block in memory, from an offset on. It may wait for a part
that is not published yet; what was given up is answered at once.

A request is a head of fixed size and a name, an answer a head and as many bytes as it says. Names
are looked up among what was published, and never joined to a path before. What does not fit ends
the connection.

There are at most MOST_CONNECTIONS. Peers beyond wait to be greeted, and the connection that has
stood idle longest since its last answer is closed for each of them. So a peer asks as soon as it
has connected, and connects again where a connection that it kept is closed.
"""

from __future__ import annotations

import _thread
import contextlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.coordination.address import join_address

from ..closing import Closing
from .peer_tls import BadTlsFiles, PeerTls

_log = logging.getLogger(__name__)
MAGIC = b"holdfast-part/2\n"
PROOF_BYTES = NONCE_BYTES = 32
# the bytes of the name, milliseconds to wait for a part, offset, size
REQUEST = struct.Struct("!HIQQ")
ANSWER = struct.Struct("!BQ")  # how it went, the bytes that follow
THERE = 0
ABSENT = 1
LATE = 2
NAME_LIMIT_BYTES = 512
MOST_CONNECTIONS = 256
BACKLOG = 4096  # connections that wait in the kernel to be accepted, if it allows so many
GREETING_S = 10.0  # for a new connection to prove itself, and then to ask
IDLE_S = 600.0  # between two requests, and the longest wait for a part
PIECE_BYTES = 1 << 20  # that are encrypted in turn
SEND_S = 60.0  # for a peer that does not take what it asked for
SLICES = 8  # of each wait


class UnfitRequest(OSError):
    """Says that a peer does not speak as peers do."""


def proof(secret: bytes, role: bytes, nonces: bytes, fingerprint: bytes = b"") -> bytes:
    """Returns what shows that one knows the secret, in one role, to who has drawn one of the
    nonces; under TLS, over one connection.

    `fingerprint` is that of the certificate that the server shows.
    """
    return hmac.digest(secret, MAGIC + role + nonces + fingerprint, "sha256")


def receive(connection: socket.socket, buffer: memoryview, timeout_s: float) -> None:
    """Fills a buffer of bytes from a connection. Raises OSError where it ends before, TimeoutError
    after `timeout_s` for all of it.

    The time is counted in slices: a process that was stopped meanwhile has waited for one.
    """
    left_s = timeout_s
    slice_s = timeout_s / SLICES
    while buffer.nbytes:
        connection.settimeout(max(0.001, min(slice_s, left_s)))
        began_s = time.monotonic()
        try:
            got = connection.recv_into(buffer)
        except TimeoutError:
            if left_s <= slice_s:
                raise
        else:
            if not got:
                raise ConnectionResetError("it has closed the connection")
            buffer = buffer[got:]
        left_s -= min(slice_s, time.monotonic() - began_s)


def receive_bytes(connection: socket.socket, size: int, timeout_s: float) -> bytes:
    """Returns so many bytes from a connection; raises as `receive`."""
    data = bytearray(size)
    receive(connection, memoryview(data), timeout_s)
    return bytes(data)


class PartServer(Closing):
    """Serves what is published. A context manager; `close()` ends all connections. Thread-safe.

    `address` is HOST:PORT, for peers.
    """

    def __init__(self, host: str, secret: bytes, tls: PeerTls | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._secret = secret
        self._tls = tls
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._offered: dict[str, Path | bytes | None] = {}  # by name; None: it was given up
        self._memory: Callable[[str, int, int], memoryview | None] | None = None
        self._connections: set[socket.socket] = set()
        # Those that were answered and do not ask, the longest idle first. The values are unused.
        self._idle: dict[socket.socket, None] = {}
        self._is_closed = False
        self._counts = {"connections": 0, "refused": 0, "served_bytes": 0}
        port = self._listener.getsockname()[1]
        self.address = join_address(host, port)
        _thread.start_new_thread(self._accept, ())  # in one operation: Ctrl-C may come

    # --- what it serves

    def publish(self, folder: Path, name: str, files: Iterable[str]) -> None:
        """Serves a part by its name, and its files, from now on, below the folder of the run."""
        self._offer({each: folder / each for each in (*files, name)})

    def offer(self, name: str, text: bytes) -> None:
        """Serves a text that is no file from now on."""
        self._offer({name: text})

    def offer_memory(self, find: Callable[[str, int, int], memoryview | None]) -> None:
        """Serves what `find` returns of a name, by offset and size, where no file has the name.

        None is an absent file, and TimeoutError says that the bytes are not there yet. `find` is
        called by the threads of the connections, and may block for a short time.
        """
        with self._changed:
            self._memory = find

    def give_up(self, name: str) -> None:
        """Tells who waits for a part that it will not come."""
        self._offer({name: None})

    def _offer(self, found: Mapping[str, Path | bytes | None]) -> None:
        with self._changed:
            self._offered.update(found)
            self._changed.notify_all()

    def withdraw(self, folder: str) -> None:
        """Serves nothing of a local save any more."""
        with self._changed:
            for name in [each for each in self._offered if each.startswith(f"{folder}/")]:
                del self._offered[name]

    def statistics(self) -> dict[str, int]:
        """Returns counts of connections, of those that were refused, of bytes served, and of the
        names that are served now.
        """
        with self._changed:
            return {**self._counts, "names": len(self._offered)}

    # --- connections

    def _accept(self) -> None:
        threading.current_thread().name = "holdfast-part-server"
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning(
                    "the part server at %s could not take a connection: %s", self.address, error
                )
                time.sleep(0.1)  # out of descriptors: they come back as others close
                continue
            with self._changed:
                # Every place is given up in time: each wait of its peer has a bound.
                self._has_room.wait_for(self._make_room)
                if self._is_closed:
                    connection.close()
                    return
                self._counts["connections"] += 1
                self._connections.add(connection)
            try:
                _thread.start_new_thread(self._serve, (connection,))
            except (
                RuntimeError
            ) as error:  # a limit of processes: others end, and the peer asks again
                _log.warning(
                    "the part server at %s could not serve a connection: %s", self.address, error
                )
                self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._has_room.notify()
        connection.close()

    def _make_room(self) -> bool:
        """Says whether one more connection may be served; ends an idle one for it if need be."""
        if self._idle and len(self._connections) >= MOST_CONNECTIONS:
            longest = next(iter(self._idle))
            self._idle.pop(longest)
            self._connections.discard(longest)
            _shut_down(longest)
        return len(self._connections) < MOST_CONNECTIONS or self._is_closed

    def _serve(self, connection: socket.socket) -> None:
        threading.current_thread().name = "holdfast-part"
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fingerprint = b""
            if self._tls is not None:
                secured, fingerprint = self._tls.accepted(connection)
                connection = self._replace(connection, secured)
                _shake_hands(secured)
            self._greet(connection, fingerprint)
            self._answer(connection, receive_bytes(connection, REQUEST.size, GREETING_S))
            while True:
                self._answer(connection, self._next_request(connection))
        except OSError as error:  # it went, or it is no peer
            if isinstance(error, UnfitRequest | BadTlsFiles):
                _log.warning("the part server at %s ended a connection: %s", self.address, error)
                with self._changed:
                    self._counts["refused"] += 1
        finally:
            self._let_go(connection)

    def _replace(self, plain: socket.socket, connection: socket.socket) -> socket.socket:
        with self._changed:
            self._connections.discard(plain)
            self._connections.add(connection)
            if self._is_closed:
                connection.close()
        return connection

    def _greet(self, connection: socket.socket, fingerprint: bytes) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.settimeout(GREETING_S)
        connection.sendall(MAGIC + nonce)
        answer = receive_bytes(connection, NONCE_BYTES + PROOF_BYTES, GREETING_S)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(
            answer[NONCE_BYTES:], proof(self._secret, b"client", nonces, fingerprint)
        ):
            raise UnfitRequest(
                "who connected does not know this job's secret: it is of another attempt, or a"
                " stranger"
            )
        connection.sendall(proof(self._secret, b"server", nonces, fingerprint))

    def _next_request(self, connection: socket.socket) -> bytes:
        """Returns the head of the next request; the connection may be ended until it comes."""
        with self._changed:
            self._idle[connection] = None
            self._has_room.notify()
        try:
            return receive_bytes(connection, REQUEST.size, IDLE_S)
        finally:
            with self._changed:
                self._idle.pop(connection, None)

    def _answer(self, connection: socket.socket, request: bytes) -> None:
        length, wait_ms, offset, size = REQUEST.unpack(request)
        if not 0 < length <= NAME_LIMIT_BYTES:
            raise UnfitRequest(f"it asked with a name of {length} bytes")
        name = receive_bytes(connection, length, SEND_S).decode(errors="replace")
        connection.settimeout(SEND_S)
        found: memoryview | int | None = None
        status = ABSENT
        try:
            found = self._find(name, offset, size, min(wait_ms / 1000, IDLE_S))
        except TimeoutError:
            status = LATE
        if found is None:
            connection.sendall(ANSWER.pack(status, 0))
            return
        if isinstance(found, memoryview):
            size = found.nbytes
            connection.sendall(ANSWER.pack(THERE, size))
            connection.sendall(found)
        else:
            size = _send_file(connection, found, offset, size)
        with self._changed:
            self._counts["served_bytes"] += size

    def _find(self, name: str, offset: int, size: int, wait_s: float) -> memoryview | int | None:
        """Returns bytes of memory, or the descriptor of a file; None for what is not there. Raises
        TimeoutError for what is not there yet.
        """
        with self._changed:
            if wait_s and not self._changed.wait_for(
                lambda: self._is_closed or name in self._offered, wait_s
            ):
                raise TimeoutError
            found = self._offered.get(name)
            find = self._memory
        if isinstance(found, bytes):
            return memoryview(found)[offset : offset + size]
        if found is None:
            return None if find is None else find(name, offset, size)
        try:
            return os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None

    # --- the end

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._connections)
            self._changed.notify_all()
            self._has_room.notify()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listener.close()
        for connection in connections:
            _shut_down(connection)

    def __del__(self, warn: Any = warnings.warn) -> None:
        if not getattr(self, "_is_closed", True):
            warn(f"the part server at {self.address} was not closed", ResourceWarning, stacklevel=2)


def _shut_down(connection: socket.socket) -> None:
    """Ends a connection for the peer, and for the thread that serves it."""
    with contextlib.suppress(OSError):
        # TLS's own would have what is sent next go in the clear.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _shake_hands(connection: ssl.SSLSocket) -> None:
    """Raises UnfitRequest where who connected has no certificate of this job's authority, or speaks
    no TLS.
    """
    connection.settimeout(GREETING_S)  # for all of it
    try:
        connection.do_handshake()
    except ssl.SSLEOFError:  # it went
        raise
    except ssl.SSLError as error:
        raise UnfitRequest(
            f"who connected did not show a certificate of this job's authority by TLS: {error}"
        ) from error


def _send_file(connection: socket.socket, descriptor: int, offset: int, size: int) -> int:
    """Answers with so many bytes of a file, and closes it; returns how many there were."""
    with os.fdopen(descriptor, "rb") as file:
        size = max(0, min(size, os.fstat(descriptor).st_size - offset))
        connection.sendall(ANSWER.pack(THERE, size))
        if size and _send_range(connection, file, offset, size) != size:
            raise UnfitRequest("a file was cut while it was sent")
    return size


def _send_range(connection: socket.socket, file: BinaryIO, offset: int, size: int) -> int:
    """Sends so many bytes of a file, and returns how many there were."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.sendfile(file, offset, size)
    memory = memoryview(bytearray(min(PIECE_BYTES, size)))
    sent = 0
    while sent < size and (got := os.preadv(file.fileno(), [memory[: size - sent]], offset + sent)):
        connection.sendall(memory[:got])
        sent += got
    return sent

"""Connections to the part servers of peers."""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from holdfast.coordination.address import connect

from ..closing import Closing
from .part_server import (
    ABSENT,
    ANSWER,
    LATE,
    MAGIC,
    NONCE_BYTES,
    PIECE_BYTES,
    PROOF_BYTES,
    REQUEST,
    THERE,
    proof,
    receive,
    receive_bytes,
)
from .peer_tls import PeerTls

CONNECT_S = 10.0
TEXT_LIMIT_BYTES = 256 << 20  # of a part: as a checkpoint's record


class PeerFailed(OSError):
    """Says which peer did not answer as peers do, and what it did instead."""


class PeerClosed(PeerFailed):
    """Says that a peer has ended a connection: it is gone, or needs the place for another."""


class PeerLate(PeerFailed):
    """Says that a peer does not have yet what it was asked for. The connection stays of use."""


class PeerConnection(Closing):
    """A connection to the part server of one peer, for one thread at a time. After an error it is
    of no more use. A context manager.

    With `tls` both sides show a certificate. Raises PeerFailed where the peer cannot be reached
    within CONNECT_S, is silent for longer than `timeout_s` allows (a server with many peers lets
    one more wait), or lies; PeerClosed where it ends the connection.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        tls: PeerTls | None = None,
        *,
        timeout_s: float = CONNECT_S,
    ) -> None:
        self.address = address
        self._end = time.monotonic() + timeout_s
        with self._errors("be reached"):
            self._socket: socket.socket = connect(address, min(CONNECT_S, timeout_s))
        try:
            with self._errors("prove itself"):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                fingerprint = b"" if tls is None else self._secure(tls)
                self._greet(secret, fingerprint)
        except BaseException:
            self._socket.close()
            raise

    def _secure(self, tls: PeerTls) -> bytes:
        """Goes over to TLS, and returns the fingerprint of the server's certificate."""
        self._socket.settimeout(self._left_s)
        self._socket, fingerprint = tls.connected(self._socket)
        return fingerprint

    def _greet(self, secret: bytes, fingerprint: bytes) -> None:
        hello = self._receive(len(MAGIC) + NONCE_BYTES)
        if not hello.startswith(MAGIC):
            raise ValueError(f"it says {hello[:16]!r}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = hello[len(MAGIC) :] + nonce
        self._socket.sendall(nonce + proof(secret, b"client", nonces, fingerprint))
        if not hmac.compare_digest(
            self._receive(PROOF_BYTES),
            proof(secret, b"server", nonces, fingerprint),
        ):
            raise ValueError("it does not know this job's secret")

    def wait(self, name: str, timeout_s: float) -> bytes:
        """Returns the text of a part once it is published. Blocks for `timeout_s` at most."""
        self._end = time.monotonic() + timeout_s
        with self._errors(f"give {name}"):
            wait_s = timeout_s - 0.5 * min(1.0, timeout_s)
            return self._receive(self._ask(name, 0, TEXT_LIMIT_BYTES, wait_s))

    def read(self, name: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int:
        """Fills the buffers with bytes of a file; returns how many there were, fewer only at its
        end. FileNotFoundError: it has none. PeerLate: it does not have them yet.

        The answer may take `timeout_s`, and each PIECE_BYTES of it.
        """
        self._end = time.monotonic() + timeout_s
        with self._errors(f"give {name}"):
            size = got = self._ask(name, offset, sum(buffer.nbytes for buffer in buffers))
            for buffer in buffers:
                data = buffer.cast("B")[:size] if size else buffer[:0]
                for at in range(0, data.nbytes, PIECE_BYTES):
                    receive(self._socket, data[at : at + PIECE_BYTES], timeout_s)
                size -= data.nbytes
            return got

    @property
    def _left_s(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def _receive(self, size: int) -> bytes:
        return receive_bytes(self._socket, size, self._left_s)

    def _ask(self, name: str, offset: int, size: int, wait_s: float = 0.0) -> int:
        """Asks for so many bytes; returns how many come now."""
        encoded = name.encode()
        wait_ms = math.ceil(1000 * max(0.0, wait_s))
        self._socket.settimeout(self._left_s)
        self._socket.sendall(REQUEST.pack(len(encoded), wait_ms, offset, size) + encoded)
        status, found = map(int, ANSWER.unpack(self._receive(ANSWER.size)))
        if status == LATE:
            why = f"could not give {name}: it was not published in time"
            raise PeerLate(errno.EIO, f"the part server at {self.address} {why}")
        if status == ABSENT and not found:
            raise FileNotFoundError(errno.ENOENT, "it has no such part or file")
        if status != THERE or found > size:
            raise ValueError(
                f"it answers {status} with {found} bytes, where at most {size} were asked for"
            )
        return found

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, PeerLate):
            raise
        except (OSError, ValueError) as error:
            why = "it was silent for too long" if isinstance(error, TimeoutError) else str(error)
            has_closed = isinstance(error, ConnectionError | ssl.SSLEOFError)
            kind = PeerClosed if has_closed else PeerFailed
            raise kind(
                errno.EIO, f"the part server at {self.address} could not {what}: {why}"
            ) from error

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._socket.close()


class Peers(Closing):
    """The part servers of a job by rank, with connections that are kept for the next call. A
    context manager. Thread-safe.
    """

    def __init__(
        self,
        addresses: Mapping[int, str],
        secret: bytes,
        timeout_s: float,
        tls: PeerTls | None = None,
    ) -> None:
        self._addresses = addresses
        self._secret = secret
        self._timeout_s = timeout_s
        self._tls = tls
        self._idle: dict[int, list[PeerConnection]] = {}
        self._lock = threading.Lock()

    def read(self, rank: int, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Reads from a rank's server. Raises PeerFailed, PeerLate, FileNotFoundError."""
        timeout_s = self._timeout_s
        kept = self._take_kept(rank)
        if kept is not None:
            # The server ends connections that stand idle, if others need their places.
            with contextlib.suppress(PeerClosed), self._lent(rank, kept):
                return kept.read(name, offset, buffers, timeout_s)
        made = PeerConnection(self._addresses[rank], self._secret, self._tls, timeout_s=timeout_s)
        with self._lent(rank, made):
            return made.read(name, offset, buffers, timeout_s)

    def _take_kept(self, rank: int) -> PeerConnection | None:
        with self._lock:
            idle = self._idle.get(rank)
            return idle.pop() if idle else None

    @contextlib.contextmanager
    def _lent(self, rank: int, connection: PeerConnection) -> Iterator[None]:
        """Keeps a connection for the next read, unless it fails."""
        try:
            yield
        except (FileNotFoundError, PeerLate):  # answers like any other
            self._keep(rank, connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._keep(rank, connection)

    def _keep(self, rank: int, connection: PeerConnection) -> None:
        with self._lock:
            self._idle.setdefault(rank, []).append(connection)

    def close(self) -> None:
        """Closes all connections that are not lent."""
        with self._lock:
            idle = self._idle
            self._idle = {}
        for connection in [each for found in idle.values() for each in found]:
            connection.close()

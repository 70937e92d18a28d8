"""Reads parts from peers: connections to their part servers, and a storage that has the files of
one local step, wherever copies lie.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from holdfast.coordination.address import connect

from ..format.limits import RECORD_LIMIT_BYTES
from ..storage.base import Entry, Part
from ..storage.local import LocalStorage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .part_server import (
    ABSENT,
    ANSWER,
    GET,
    LATE,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    REQUEST,
    THERE,
    WAIT,
    proof,
    receive,
    receive_bytes,
)
from .peer_tls import PeerTls

_log = logging.getLogger(__name__)
CONNECT_S = 10.0


class PeerFailed(OSError):
    """Says which peer did not answer as peers do, and what it did instead."""


class PeerClosed(PeerFailed):
    """Says that a peer has ended a connection: it is gone, or needs the place for another."""


class PeerConnection:
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
        hello = receive_bytes(self._socket, len(MAGIC) + NONCE_BYTES, self._left_s)
        if not hello.startswith(MAGIC):
            raise ValueError(f"it says {hello[:16]!r}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = hello[len(MAGIC) :] + nonce
        self._socket.sendall(nonce + proof(secret, b"client", nonces, fingerprint))
        if not hmac.compare_digest(
            receive_bytes(self._socket, PROOF_BYTES, self._left_s),
            proof(secret, b"server", nonces, fingerprint),
        ):
            raise ValueError("it does not know this job's secret")

    def wait(self, name: str, timeout_s: float) -> bytes:
        """Returns the text of a part once it is published. Blocks for `timeout_s` at most."""
        self._end = time.monotonic() + timeout_s
        with self._errors(f"give {name}"):
            self._ask(WAIT, name, int(1000 * max(0.0, timeout_s - 0.5 * min(1.0, timeout_s))), 0)
            size = self._answer(RECORD_LIMIT_BYTES)
            return receive_bytes(self._socket, size, self._left_s)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int:
        """Fills the buffers with bytes of a file; returns how many there were, fewer only at its
        end. FileNotFoundError: it has none.
        """
        self._end = time.monotonic() + timeout_s
        with self._errors(f"give {name}"):
            self._ask(GET, name, offset, sum(buffer.nbytes for buffer in buffers))
            size = got = self._answer(sum(buffer.nbytes for buffer in buffers))
            for buffer in buffers:
                piece = buffer.cast("B")[:size] if size else buffer[:0]
                receive(self._socket, [piece], self._left_s)
                size -= piece.nbytes
            return got

    @property
    def _left_s(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def _ask(self, kind: int, name: str, offset: int, size: int) -> None:
        encoded = name.encode()
        self._socket.settimeout(self._left_s)
        self._socket.sendall(REQUEST.pack(kind, len(encoded), offset, size) + encoded)

    def _answer(self, limit_bytes: int) -> int:
        status, size = map(
            int, ANSWER.unpack(receive_bytes(self._socket, ANSWER.size, self._left_s))
        )
        if status == LATE:
            raise OSError("it was not published in time")
        if status == ABSENT and not size:
            raise FileNotFoundError(errno.ENOENT, "it has no such part or file")
        if status != THERE or size > limit_bytes:
            raise ValueError(
                f"it answers {status} with {size} bytes, where at most {limit_bytes} were asked for"
            )
        return size

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            why = "it was silent for too long" if isinstance(error, TimeoutError) else str(error)
            is_closed = isinstance(error, ConnectionError | ssl.SSLEOFError)
            kind = PeerClosed if is_closed else PeerFailed
            raise kind(
                errno.EIO, f"the part server at {self.address} could not {what}: {why}"
            ) from error

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Peers:
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
        """Reads from a rank's server. Raises PeerFailed, FileNotFoundError."""
        kept = self._take_kept(rank)
        if kept is not None:
            # The server ends connections that stand idle, if others need their places.
            with contextlib.suppress(PeerClosed), self._lent(rank, kept):
                return kept.read(name, offset, buffers, self._timeout_s)
        address = self._addresses[rank]
        made = PeerConnection(address, self._secret, self._tls, timeout_s=self._timeout_s)
        with self._lent(rank, made):
            return made.read(name, offset, buffers, self._timeout_s)

    def _take_kept(self, rank: int) -> PeerConnection | None:
        with self._lock:
            idle = self._idle.get(rank)
            return idle.pop() if idle else None

    @contextlib.contextmanager
    def _lent(self, rank: int, connection: PeerConnection) -> Iterator[None]:
        """Keeps a connection for the next read, unless it fails."""
        try:
            yield
        except FileNotFoundError:  # an answer like any other
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PeerStorage:
    """The files of one local step as a store to read from: this host's own, else a peer's.
    Thread-safe.

    `folder` is that of the step, below the run's, `record` its record. `holders[process]` are the
    ranks that hold a process's part, best first; `own` are those whose folder is this process's. A
    copy that fails is passed over for the next, and a peer that did not answer is asked last.
    """

    max_file_bytes: int | None = None
    max_concurrency: int = 4
    posix = conditions = tensorstore = None

    def __init__(
        self,
        own_folder: LocalStorage,
        folder: str,
        record: bytes,
        holders: Sequence[Sequence[int]],
        *,
        own: frozenset[int],
        peers: Peers,
    ) -> None:
        self._own_folder = own_folder
        self._folder = folder
        self._record = record
        self._peers = peers
        self._own = own
        self._holders = [sorted(ranks, key=lambda rank: rank not in own) for ranks in holders]
        self._damaged: dict[str, set[int]] = {}  # by file: the ranks whose copy is
        self._last: dict[str, int] = {}  # by file: the rank that it was read from
        self._silent: set[int] = set()
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._own_folder.root

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills the buffers from the best copy that answers. Raises the last one's OSError;
        FileNotFoundError where none has it.
        """
        error: OSError | None = None
        for rank in self._sources(name):
            self._last[name] = rank
            try:
                if rank in self._own:
                    return self._own_folder.read(name, offset, buffers)
                return self._peers.read(rank, name, offset, buffers)
            except OSError as failed:
                _log.warning("%s is read from another copy than rank %d's: %s", name, rank, failed)
                error = failed
                if not isinstance(failed, FileNotFoundError) and rank not in self._own:
                    with self._lock:
                        self._silent.add(rank)
        raise error or FileNotFoundError(
            errno.ENOENT, "no host that is there has a copy", join(self.root, name)
        )

    def _sources(self, name: str) -> list[int]:
        head = name.removeprefix(f"{self._folder}/").rpartition("/")[2].partition("-")[0]
        if (
            not name.startswith(f"{self._folder}/")
            or not head.isdecimal()
            or int(head) >= len(self._holders)
        ):
            return []
        with self._lock:
            damaged = self._damaged.get(name, set())
            ranks = [rank for rank in self._holders[int(head)] if rank not in damaged]
            return sorted(ranks, key=lambda rank: rank in self._silent)

    def pass_over(self, path: str) -> bool:
        """Passes over the copy of a file that was read last and was damaged; returns whether there
        is another one.

        `path` is the file's, as errors show it.
        """
        name = path.removeprefix(f"{self.root}/")
        with self._lock:
            if name not in self._last:
                return False
            self._damaged.setdefault(name, set()).add(self._last[name])
        return bool(self._sources(name))

    def size(self, name: str) -> int:
        """Raises OSError: nobody asks for the size of a file whose record is known."""
        raise OSError(
            errno.ENOTSUP,
            "the sizes of a local step's files are in its record",
            join(self.root, name),
        )

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        """Returns the record; no other file is small."""
        if name != join(self._folder, RECORD_NAME):
            raise FileNotFoundError(errno.ENOENT, "no such file", join(self.root, name))
        return self._record

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        """Raises OSError, as all that would change something."""
        raise OSError(errno.EROFS, "a local step is only read here", join(self.root, name))

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        """Raises OSError."""
        raise OSError(errno.EROFS, "a local step is only read here", join(self.root, name))

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        """Lists nothing: the record says what there is."""
        return []

    def close(self) -> None:
        """Closes the connections to peers that are not in use."""
        self._peers.close()

    def delete(self, names: Sequence[str]) -> None:
        """Raises OSError."""
        raise OSError(errno.EROFS, "a local step is only read here", self.root)

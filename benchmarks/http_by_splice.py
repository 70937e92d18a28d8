"""As much of HTTP/1.1 as the benchmarks' server and proxy need; bodies stay in the kernel."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from dataclasses import dataclass
from typing import Self

HEAD_LIMIT_BYTES = 64 << 10
PIPE_BYTES = 1 << 20
REASONS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    404: "Not Found",
    409: "Conflict",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
    501: "Not Implemented",
}


@dataclass(frozen=True)
class Head:
    """The head of a request or an answer, its last empty line included."""

    raw: bytes

    @property
    def method(self) -> str:
        return self.raw.split(b" ", 1)[0].decode()

    @property
    def target(self) -> str:
        return self.raw.split(b" ", 2)[1].decode()

    def header(self, name: str) -> str | None:
        """Returns what a header says, None where it is not there."""
        found = re.search(rb"\r\n" + name.encode() + rb":[ \t]*([^\r\n]*)", self.raw, re.IGNORECASE)
        return found[1].decode().strip() if found else None

    @property
    def length(self) -> int:
        """The bytes of the body. Raises ValueError where its length is not said before."""
        if self.header("transfer-encoding") is not None:
            raise ValueError(f"expected a Content-Length, found a body in chunks: {self.raw!r}")
        return int(self.header("content-length") or 0)

    @property
    def expects_continue(self) -> bool:
        return (self.header("expect") or "").lower() == "100-continue"


class Connection:
    """One side of a connection. A head is looked at before it is taken: a body is never touched."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer = peer

    def fileno(self) -> int:
        return self._peer.fileno()

    def head(self) -> Head | None:
        """Returns the next head, None where the other side has ended the connection."""
        taken = b""
        while not taken.endswith(b"\r\n\r\n"):
            seen = self._peer.recv(HEAD_LIMIT_BYTES, socket.MSG_PEEK)
            if not seen:
                return None
            # The end may lie across what was taken before.
            joined = taken + seen
            end = joined.find(b"\r\n\r\n")
            count = len(seen) if end < 0 else end + 4 - len(taken)
            taken += self._peer.recv(count)
        return Head(taken)

    def body(self, length: int) -> bytes:
        """Returns a small body."""
        data = b""
        while len(data) < length:
            more = self._peer.recv(length - len(data))
            if not more:
                raise ConnectionResetError("the connection ended within a body")
            data += more
        return data

    def send(self, data: bytes) -> None:
        self._peer.sendall(data)

    def answer(
        self, status: int, body: bytes = b"", *, length: int | None = None, **headers: str
    ) -> None:
        """Sends an answer, whose body of `length` bytes may follow."""
        lines = [f"HTTP/1.1 {status} {REASONS[status]}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines.append(f"Content-Length: {len(body) if length is None else length}")
        self.send("\r\n".join([*lines, "", ""]).encode() + body)


class Pipe:
    """A pipe that bytes go through from one file or socket into another, by splice."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def move(self, source: int, sink: int, count: int) -> None:
        """Moves exactly so many bytes. Raises ConnectionResetError where the source ends before."""
        while count:
            held = os.splice(source, self._in, min(count, PIPE_BYTES))
            if not held:
                raise ConnectionResetError("the connection ended within a body")
            count -= held
            while held:
                held -= os.splice(self._out, sink, held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)

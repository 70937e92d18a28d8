"""TLS between bytes and bytes, for both sides of a Session. No sockets."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

STEP_BYTES = 64 * 1024
"""So much is encrypted at a time."""
_RECORD_BYTES = 16 * 1024
"""What one read returns at most."""


class TlsBytes:
    """One side of a TLS connection. `receive` and `write` leave what has to be sent in `output`.

    Not safe from several threads. The connection is `open` once its handshake is over, and `ended`
    once the other side has said that it sends no more.
    """

    def __init__(self, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_name is None, server_name
        )
        self.open = False
        self.ended = False
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self.open = True

    def receive(self, data: bytes | memoryview) -> bytes:
        """Returns what arrived bytes say, b"" while the handshake goes on. Raises ssl.SSLError."""
        self._incoming.write(data)
        if not self.open:
            self._go_on()
        found = []
        try:
            # One read too many is an exception, which costs as much as a small frame.
            while self.open and not self.ended and (self._incoming.pending or self._tls.pending()):
                found.append(self._tls.read(_RECORD_BYTES))
                self.ended = not found[-1]
        except ssl.SSLWantReadError:
            pass
        return b"".join(found)

    def write(self, data: bytes | memoryview) -> None:
        """Encrypts."""
        self._tls.write(data)

    def output(self) -> bytes:
        """Returns what is to be sent, and forgets it."""
        return self._outgoing.read()

    def names(self) -> list[bytes]:
        """Returns the alternative names in the other side's certificate."""
        certificate: Mapping[str, Any] = self._tls.getpeercert() or {}
        return [name.encode() for _, name in certificate.get("subjectAltName", ())]

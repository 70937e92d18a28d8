"""Who is let in: the shared token, compared in constant time before any state is touched, and a bound on each peer's calls. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from ._limits import Limits
from ._outcome import Code

TOKEN_HEADER = "authorization"
"""Holds "Bearer <token>"."""


class Refused(Exception):
    """Says that a call is not let in."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Admission:
    """Looks at each call before anything else does."""

    def __init__(self, token: str | None, limits: Limits) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._limits = limits
        self._calls: dict[object, int] = {}
        self._second = 0.0

    def admit(self, peer: object, metadata: Iterable[tuple[object, object]], now: float) -> None:
        """Raises Refused unless the call holds the token and its peer is within bounds."""
        if self._expected is not None and not self._holds_token(metadata):
            raise Refused(Code.UNAUTHENTICATED, f"the call does not hold this job's token; expected it in {TOKEN_HEADER!r}")
        self.count(peer, now)

    def _holds_token(self, metadata: Iterable[tuple[object, object]]) -> bool:
        assert self._expected is not None
        for name, value in metadata:
            if name in (TOKEN_HEADER, TOKEN_HEADER.encode()):
                found = value if isinstance(value, bytes) else str(value).encode()
                return hmac.compare_digest(found, self._expected)
        return False

    def count(self, peer: object, now: float) -> None:
        """Counts a call of a peer; raises Refused past the bound."""
        if now - self._second >= 1.0:
            self._second = now
            self._calls.clear()
        calls = self._calls[peer] = self._calls.get(peer, 0) + 1
        if calls > self._limits.calls_per_second:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"more than {self._limits.calls_per_second} calls in a second from one peer; slow down")

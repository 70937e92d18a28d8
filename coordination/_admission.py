"""Who is let in, and as whom. Pure.

Before any state is touched: the shared token, compared in constant time, and a bound on each peer's calls. With TLS or a token on, a
task id can only be used by whom it was given to (`Owners`). Profile A's calls hold their task's incarnation, which is checked always; a
Session is one stream; profiles B and D hold neither, so there a task belongs to the connection that registered it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

from ._limits import Limits
from ._outcome import Code, Refusal
from ._tasks import Roster, TaskState

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
        self._second, self._total = 0.0, 0

    def admit(self, peer: Callable[[], object], metadata: Iterable[tuple[object, object]], now: float) -> None:
        """Raises Refused unless the call holds the token and its peer is within bounds."""
        if self._expected is not None and not self._holds_token(metadata):
            raise Refused(Code.UNAUTHENTICATED, f"the call does not hold this job's token; expected it in {TOKEN_HEADER!r}")
        self._count(peer, now)

    def _holds_token(self, metadata: Iterable[tuple[object, object]]) -> bool:
        assert self._expected is not None
        for name, value in metadata:
            if name in (TOKEN_HEADER, TOKEN_HEADER.encode()):
                found = value if isinstance(value, bytes) else str(value).encode()
                return hmac.compare_digest(found, self._expected)
        return False

    def _count(self, peer: Callable[[], object], now: float) -> None:
        """Counts calls. Peers are told apart only in a second in which all together pass the bound of one: asking gRPC for them costs."""
        if now - self._second >= 1.0:
            self._second, self._total = now, 0
            self._calls.clear()
        self._total += 1
        if self._total <= self._limits.calls_per_second:
            return
        name = peer()
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if calls > self._limits.calls_per_second:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"more than {self._limits.calls_per_second} calls in a second from one peer; slow down")


class Owners:
    """Which connection each task id was given to, in a service with TLS or a token. Peers are gRPC's words, like "ipv4:10.0.0.7:4321"."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._peers: dict[int, str] = {}

    def may_register(self, task_id: int, incarnation: int, peer: str) -> Refusal | None:
        """Decides whether an agent may register; the task is then its peer's."""
        task, owner = self._roster.get(task_id), self._peers.get(task_id)
        if task is None:
            return None
        if owner is not None and task.state is TaskState.CONNECTED:
            taken = task.agent not in (0, incarnation) and owner != peer
            if taken or (task.session and _host(owner) != _host(peer)):
                return _denied(task_id)
        self._peers[task_id] = peer
        return None

    def may_open(self, task_id: int, incarnation: int, peer: str, has_stream: bool) -> Refusal | None:
        """Decides whether a Session may open; the task is then its peer's."""
        task, owner = self._roster.get(task_id), self._peers.get(task_id)
        if task is None:
            return None
        taken = owner is not None and (has_stream or _host(owner) != _host(peer))
        if taken and task.state is TaskState.CONNECTED and task.session != incarnation:
            return _denied(task_id)
        self._peers[task_id] = peer
        return None

    def may_call(self, task_id: int, peer: str) -> Refusal | None:
        """Decides about a call that holds no incarnation; a negative task id stands for any task of the peer."""
        if task_id < 0:
            return None if peer in self._peers.values() else _stranger()
        return None if self._peers.get(task_id) == peer else _denied(task_id)


def _host(peer: str) -> str:
    return peer.rsplit(":", 1)[0]


def _denied(task_id: int) -> Refusal:
    return Refusal(Code.PERMISSION_DENIED, f"process {task_id} is another's: its number was given to who registered it")


def _stranger() -> Refusal:
    return Refusal(Code.PERMISSION_DENIED, "the caller has not registered; expected a registration first")

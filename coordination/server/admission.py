"""Admission of calls: who is let in, and for which tasks it may speak. Pure.

Before any state is touched: the shared token, compared in constant time, and a bound on each peer's
calls. With TLS or a token on, a task id can only be used by its owner (`TaskOwners`). An
incarnation proves nothing there: every member of the job knows those of the others. So each process
draws a secret, its key, which its client and its relay show with every call of every profile.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..core.machine import Machine
from ..core.status import Code, Status
from ..limits import Limits
from ..names import KEY_HEADER, TOKEN_HEADER

_PROCESS_URI = re.compile(rb"(?:holdfast:|spiffe://[^/]+/(?:.+/)?holdfast/)process/(.*)")
"""A URI among a certificate's alternative names that gives a process id to its holder:
"holdfast:process/3", or for SPIFFE, whose certificates have one URI,
"spiffe://example.org/job/holdfast/process/3". The latter passes jax_mtls_peer_uri_prefix too.
"""


_NO_KEY = (
    f"the call holds no key; expected a secret of its process in {KEY_HEADER!r}, or a certificate"
    " that names its process"
)
_UNKNOWN_KEY = "no process has come with the key of this call; expected a registration first"


class CallRefused(Exception):
    """A call that is not let in, and why."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Admission:
    """Checks each call before anything else: its token, and the rate of its peer's calls."""

    def __init__(self, token: str | None, limits: Limits) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._limits = limits
        self._calls: Counter[object] = Counter()
        self._second = 0.0
        self._total = 0

    def admit(self, peer: Callable[[], object], authorization: bytes, now: float) -> None:
        """Raises CallRefused unless a call holds the token and its peer is within bounds."""
        # In constant time: otherwise its length would tell how much of a guess is right.
        if self._expected is not None and not hmac.compare_digest(authorization, self._expected):
            sentence = f"the call does not hold this job's token; expected it in {TOKEN_HEADER!r}"
            raise CallRefused(Code.UNAUTHENTICATED, sentence)
        self._count(peer, now)

    def _count(self, peer: Callable[[], object], now: float) -> None:
        """Counts calls. Peers are counted apart only in a second in which all together pass the
        bound of one: a peer's name costs time.
        """
        if now - self._second >= 1.0:
            self._second = now
            self._total = 0
            self._calls.clear()
        self._total += 1
        if self._total <= self._limits.calls_per_second:
            return
        most = self._limits.calls_per_second
        name = peer()
        self._calls[name] += 1
        if self._calls[name] > most:
            sentence = f"more than {most} calls in a second from one peer; slow down"
            raise CallRefused(Code.RESOURCE_EXHAUSTED, sentence)


class Headers(NamedTuple):
    """What a call of gRPC's shows."""

    authorization: bytes
    key: str


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> Headers:
    """Returns token and key of a call, empty where it has none."""
    # The first one counts: whoever adds a second header of the name changes nothing.
    shown = dict(reversed([*metadata]))
    authorization, key = (_bytes(shown.get(name, b"")) for name in (TOKEN_HEADER, KEY_HEADER))
    return Headers(authorization, key.decode(errors="replace"))


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class TaskOwners:
    """The owner of each task, in a service with TLS or a token: the holder of the key that the task
    came with. Only a digest of it is kept.

    A task is held while it is connected or waits to be: no call of another key speaks for it. Once
    it has shut down or is lost, its number is free: the next owner brings a key of its own. A
    certificate that names processes (_PROCESS_URI) speaks for these only, and at any time: nobody
    can come before it, and a next life need not wait. It stands for the key: jaxlib's own mTLS
    clients, which know of no key, come with such a certificate alone.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._task_table = machine.task_table

    def may_join(
        self,
        task_id: int,
        key: str,
        names: Callable[[], Iterable[bytes]] = tuple,
        has_stream: bool = True,
    ) -> Status | None:
        """Decides whether an agent may register or a Session open; the task is then its key's.
        `names` are those in its certificate.

        Where the owner is known to be away (`has_stream` False), it may have died and this be its
        next life, which should come again.
        """
        task = self._task_table.get(task_id)
        certified = _certified(names())
        if not key and certified is None:
            return _denied(_NO_KEY)
        if task is not None and certified is not None and task_id not in certified:
            return _not_certified(task_id, certified)
        if task is None or not key or (owner := _digest(key)) == task.owner:
            return None
        # A process that died comes again with another key. Until it is given up, its number is
        # held: a stranger would otherwise take the place of any process that it cut off.
        if certified is None and self._machine.registration.held(task_id):
            return _anothers(task_id) if has_stream else self._not_yet(task_id)
        self._task_table.set_owner(task, owner)
        return None

    def may_call(
        self, task_id: int, key: str, names: Callable[[], Iterable[bytes]] = tuple
    ) -> Status | None:
        """Decides whether a call may speak for a task; a negative task id stands for any task of
        its key or certificate.
        """
        if not key:
            certified = _certified(names())
            if certified is None:
                return _denied(_NO_KEY)
            if task_id < 0 or task_id in certified:
                return None
            return _not_certified(task_id, certified)
        owner = _digest(key)
        if task_id < 0:
            return None if self._task_table.owned[owner] else _denied(_UNKNOWN_KEY)
        task = self._task_table.get(task_id)
        return None if task is None or task.owner == owner else _anothers(task_id)

    def _not_yet(self, task_id: int) -> Status:
        limit_s = self._machine.config.heartbeat_timeout_s
        sentence = (
            f"process {task_id} is another's, which has no Session now: its number is free once"
            f" that one is given up, in {limit_s:g} s at most"
        )
        # UNAVAILABLE, which a client waits out: this may be the next life of the process.
        return Status(Code.UNAVAILABLE, sentence)


def _certified(names: Iterable[bytes]) -> frozenset[int] | None:
    """Returns the processes that a certificate names, None where it names none."""
    numbers = [match[1] for match in map(_PROCESS_URI.fullmatch, names) if match]
    if not numbers:
        return None
    return frozenset(int(number) for number in numbers if number.isdigit())


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _denied(sentence: str) -> Status:
    return Status(Code.PERMISSION_DENIED, sentence, from_service=False)


def _not_certified(task_id: int, certified: frozenset[int]) -> Status:
    named = ", ".join(map(str, sorted(certified))) or "none"
    return _denied(f"process {task_id} is another's: the caller's certificate names {named} alone")


def _anothers(task_id: int) -> Status:
    return _denied(
        f"process {task_id} is another's: the call does not hold the key that it came with; give"
        " each process a number of its own"
    )

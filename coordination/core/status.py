"""The error of a call: a status with its code, its sentence and its facts; and what is encoded once
of what many calls are answered. And which rows of a journal have changed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from holdfast.proto import session_pb2

from ..task_bits import bits_of


class Code(IntEnum):
    """The status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class Missing:
    """A process that a call waits for, as it was known when the call failed. `silent_s` is None for
    one never seen.
    """

    task_id: int
    host: str
    silent_s: float | None
    lost: bool
    progress: session_pb2.ReportRequest | None = None  # None where it has reported nothing
    ended: str = ""  # how, where that is known: "ended by signal 9", LEFT

    def __str__(self) -> str:
        if self.ended:
            state = self.ended
        elif self.silent_s is None:
            state = "never seen"
        else:
            decimals = 0 if self.silent_s >= 10 else 1
            state = f"silent for {self.silent_s:.{decimals}f} s"
        host = f"host {self.host}, " if self.host else ""
        return f"{self.task_id} ({host}{state})"


def clip(text: str, most_bytes: int) -> str:
    """Returns `text`, cut to so many bytes."""
    return text.encode()[:most_bytes].decode(errors="ignore")


MAX_NAMED = 40
"""An error describes at most this many processes: jaxlib cuts messages at 3,072 bytes. The others
are bits in its payload.
"""


def name_processes(missing: Sequence[Missing], count: int = 0) -> str:
    """Returns "process 2 (host b7, silent for 12 s)", or "processes ..." for several; `missing` are
    the first of `count`, where they are more.
    """
    names = [str(each) for each in missing]
    if count > len(missing):
        names.append(f"and {count - len(missing)} more")
    what = "process" if len(missing) == 1 else "processes"
    return f"{what} {', '.join(names)}"


def beyond(named: Sequence[Missing], task_ids: Collection[int]) -> int:
    """Returns a status's `absent`: the tasks that it is about, where it names only some."""
    return bits_of(task_ids) if len(task_ids) > len(named) else 0


LEFT = "shut down"
"""How a process ended that left in order."""


def name_gone(missing: Sequence[Missing], count: int = 0) -> str:
    """Returns "process 2 (host b7, silent for 12 s) is lost", or that it has left the job."""
    one = len(missing) == 1
    who = name_processes(missing, count)
    if all(each.ended == LEFT for each in missing):
        return f"{who} {'has' if one else 'have'} left the job"
    return f"{who} {'is' if one else 'are'} lost"


@dataclass(frozen=True, slots=True)
class Status:
    """Why a call failed. The flags say which payloads travel with it (proto/coordination.proto has
    their messages).
    """

    code: Code
    message: str
    from_service: bool = True  # CoordinationServiceError: a caller that sees it does not retry
    source_task: int | None = None  # the task that the error is about
    reported: bool = False  # by the task itself
    barrier: tuple[str, int] | None = None  # BarrierError: name and the service's counter
    # ServiceMismatchError: the incarnation that the caller had named. Never ours: who has not
    # registered must not learn it from an error.
    mismatch: int | None = None
    missing: tuple[Missing, ...] = ()  # the first MAX_NAMED
    absent: int = 0  # all of them, as bits, where they are more


META = "meta"
TASK = "task"
KEY = "key"
BARRIER = "barrier"
ARRIVED = "arrived"
EVENT = "event"
ALIVE = "alive"


class Changes(set[tuple[str, str | int]]):
    """Rows as (table, key), each once. What they hold by now is read when they are written."""

    def mark(self, table: str, key: str | int) -> None:
        """Notes that a row has changed, or is gone."""
        self.add((table, key))

    def take(self) -> list[tuple[str, str | int]]:
        """Returns the rows that have changed since the last call."""
        taken = list(self)
        self.clear()
        return taken


class Encodings:
    """Holds the latest answer of each kind with its encoding. Large parts of equal values should be
    the same objects: that is seen at once.
    """

    def __init__(self) -> None:
        self._latest: dict[object, tuple[object, bytes]] = {}
        self._asked: set[object] = set()

    def of(self, kind: object, value: object, encode: Callable[[], bytes]) -> bytes:
        """Returns what `encode` makes of a value, the same bytes for each call in a row."""
        held = self._latest.get(kind)
        if held is None or held[0] != value:
            held = (value, encode())
            self._latest[kind] = held
        self._asked.add(kind)
        return held[1]

    def forget_unused(self) -> None:
        """Drops what nobody has asked for since the last call: an answer may have 64 MiB."""
        for kind in self._latest.keys() - self._asked:
            del self._latest[kind]
        self._asked.clear()

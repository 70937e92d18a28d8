"""Keys with values, and the calls that wait for one. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from ..limits import Limits
from .status import KEY, Changes, Code, Completions, Missing, Status, name_gone
from .timers import Timers

_INT64 = 2**63


def normalise(key: str) -> str:
    """Drops leading, trailing and doubled slashes, as jaxlib does: "/a//b/" is "a/b"."""
    if "/" not in key:
        return key
    return "/".join(part for part in key.split("/") if part)


@dataclass(slots=True)
class KeyWait:
    """A call that waits for a key."""

    call: Any
    task_id: int
    key: str
    since: float
    depends_on: frozenset[int]
    keys: Keys
    timeout_status: Status | None = None
    done: bool = False

    def end(self) -> None:
        """Notes that the call has been answered, or dropped: its timer does nothing any more."""
        self.done = True

    def expire(self, now: float) -> None:
        """Ends the wait: its time is over."""
        status = self.timeout_status
        if status is None:
            sentence = f"key {self.key!r} was not set within {now - self.since:.1f} s"
            status = Status(Code.DEADLINE_EXCEEDED, sentence, from_service=False)
        self.keys.fail(self, status)


class Keys:
    """Holds values by normalised key, within limits."""

    def __init__(
        self, limits: Limits, timers: Timers, completions: Completions, changes: Changes
    ) -> None:
        self._limits = limits
        self._timers = timers
        self._completions = completions
        self._changes = changes
        self.values: dict[str, bytes] = {}
        self._order: list[str] = []
        self._waits: dict[str, dict[Any, KeyWait]] = {}
        self._by_call: dict[Any, KeyWait] = {}
        self._latest: tuple[str, bytes] = ("", b"")
        self.total_bytes = 0

    def insert(self, call: Any, key: str, value: bytes, allow_overwrite: bool) -> None:
        """Sets a key and answers all calls that wait for it."""
        key = normalise(key)
        if not allow_overwrite and key in self.values:
            sentence = f"key {key} already exists. Expected a new key, or allow_overwrite"
            status = Status(Code.ALREADY_EXISTS, sentence, from_service=False)
            self._completions.fail(call, status)
            return
        refusal = self.put(key, value)
        if refusal is None:
            self._completions.succeed(call)
        else:
            self._completions.fail(call, refusal)

    def set_many(self, call: Any, entries: Iterable[tuple[str, bytes]]) -> None:
        """Sets keys, whether they exist or not, until one cannot be."""
        for key, value in entries:
            refusal = self.put(normalise(key), value)
            if refusal is not None:
                self._completions.fail(call, refusal)
                return
        self._completions.succeed(call)

    def put(self, key: str, value: bytes) -> Status | None:
        """Sets a normalised key and answers all calls that wait for it; returns why it cannot
        be.
        """
        status = self._too_much(key, value)
        if status is not None:
            return status
        old = self.values.get(key)
        if old is None:
            bisect.insort(self._order, key)
            self.total_bytes += len(key)
        self.total_bytes += len(value) - len(old or b"")
        self.values[key] = value
        self._changes.mark(KEY, key)
        entry = self._entry(key)
        for wait in list(self._waits.get(key, {}).values()):
            self._forget(wait)
            self._completions.succeed(wait.call, entry)
        return None

    def _entry(self, key: str) -> tuple[str, bytes]:
        """Returns a key that exists with its value, to all who ask in a row as one object: what it
        is encoded to, is encoded once.
        """
        value = self.values[key]
        if self._latest[0] != key or self._latest[1] is not value:
            self._latest = (key, value)
        return self._latest

    def _too_much(self, key: str, value: bytes) -> Status | None:
        limits = self._limits
        if len(key.encode()) > limits.key_bytes:
            return _exhausted(
                f"a key of {len(key.encode())} bytes; expected at most {limits.key_bytes}"
            )
        if len(value) > limits.value_bytes:
            return _exhausted(
                f"key {key!r}: a value of {len(value)} bytes; expected at most {limits.value_bytes}"
            )
        old = self.values.get(key)
        total = self.total_bytes + len(value) + (len(key) if old is None else -len(old))
        if total > limits.total_bytes:
            return _exhausted(
                f"key {key!r}: all keys would hold {total} bytes; expected at most"
                f" {limits.total_bytes}; delete some"
            )
        if old is None and len(self.values) >= limits.keys:
            return _exhausted(
                f"key {key!r}: there are {len(self.values)} keys, the most that this service holds;"
                " delete some"
            )
        return None

    def get(
        self,
        call: Any,
        task_id: int,
        key: str,
        now: float,
        *,
        deadline: float,
        depends_on: frozenset[int] = frozenset(),
        timeout_status: Status | None = None,
    ) -> None:
        """Answers with the value, now or when it is set; with `timeout_status` once the time is
        over.
        """
        key = normalise(key)
        if key in self.values:
            self._completions.succeed(call, self._entry(key))
            return
        wait = KeyWait(
            call, task_id, key, now, depends_on=depends_on, keys=self, timeout_status=timeout_status
        )
        self._waits.setdefault(key, {})[call] = wait
        self._by_call[call] = wait
        self._timers.add(deadline, wait)

    def fail(self, wait: KeyWait, status: Status) -> None:
        """Ends a wait with an error."""
        self._forget(wait)
        self._completions.fail(wait.call, status)

    def _forget(self, wait: KeyWait) -> None:
        wait.end()
        del self._by_call[wait.call]
        waiting = self._waits[wait.key]
        del waiting[wait.call]
        if not waiting:
            del self._waits[wait.key]

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        wait = self._by_call.get(call)
        if wait is not None:
            self._forget(wait)
        return wait is not None

    def waiting(self) -> Iterable[KeyWait]:
        """Returns all waits."""
        return list(self._by_call.values())

    def fail_dependents(self, lost: Missing) -> None:
        """Fails all waits that depend on a lost task."""
        for wait in self.waiting():
            if lost.task_id in wait.depends_on:
                self._fail_for(wait, lost)

    def fail_unnamed(self, lost: Missing, tasks: Container[int]) -> None:
        """Fails all waits of `tasks` that do not say on whom they depend."""
        for wait in self.waiting():
            if not wait.depends_on and wait.task_id in tasks:
                self._fail_for(wait, lost)

    def _fail_for(self, wait: KeyWait, lost: Missing) -> None:
        sentence = f"key {wait.key!r} will not be set: {name_gone([lost])}"
        self.fail(wait, Status(Code.UNAVAILABLE, sentence, missing=(lost,)))

    def try_get(self, call: Any, key: str) -> None:
        """Answers at once, NOT_FOUND where there is no such key."""
        key = normalise(key)
        value = self.values.get(key)
        if value is None:
            self._completions.fail(call, Status(Code.NOT_FOUND, f"Config key {key} not found."))
        else:
            self._completions.succeed(call, (key, value))

    def increment(self, call: Any, key: str, by: int) -> None:
        """Adds to a counter, kept as decimal text, that begins at 0."""
        key = normalise(key)
        text = self.values.get(key, b"0")
        try:
            number = int(text) + by
        except ValueError:
            number = _INT64
        if not -_INT64 <= number < _INT64:
            what = f'Failed to parse value "{text[:40].decode(errors="replace")}" as an integer.'
            sentence = (
                f"{what} Key {key!r} cannot be incremented by {by}: expected a 64-bit decimal"
                " number"
            )
            status = Status(Code.FAILED_PRECONDITION, sentence, from_service=False)
            self._completions.fail(call, status)
            return
        value = str(number).encode()
        refusal = self.put(key, value)
        if refusal is None:
            self._completions.succeed(call, (key, value))
        else:
            self._completions.fail(call, refusal)

    def list_dir(self, call: Any, key: str) -> None:
        """Answers with all keys below a directory, in order."""
        below = self._below(normalise(key))
        self._completions.succeed(call, [(name, self.values[name]) for name in below])

    def _below(self, key: str) -> list[str]:
        first = bisect.bisect_left(self._order, key + "/")
        return self._order[first : bisect.bisect_left(self._order, key + "0")]  # "0" follows "/"

    def delete(self, call: Any, key: str) -> None:
        """Deletes a key and all below it; it is no error if there is none."""
        key = normalise(key)
        below = self._below(key)
        if below:
            first = bisect.bisect_left(self._order, below[0])
            del self._order[first : first + len(below)]
        for name in below:
            self._drop_value(name)
        if key in self.values:
            del self._order[bisect.bisect_left(self._order, key)]
            self._drop_value(key)
        self._completions.succeed(call)

    def _drop_value(self, key: str) -> None:
        if self._latest[0] == key:
            self._latest = ("", b"")
        self.total_bytes -= len(key) + len(self.values.pop(key))
        self._changes.mark(KEY, key)

    def load(self, values: dict[str, bytes]) -> None:
        """Loads what a journal holds."""
        self.values = dict(values)
        self._order = sorted(values)
        self.total_bytes = sum(len(key) + len(value) for key, value in values.items())


def _exhausted(sentence: str) -> Status:
    return Status(Code.RESOURCE_EXHAUSTED, sentence, from_service=False)

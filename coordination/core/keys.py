"""Keys with values, and the calls that wait for one. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterable, Iterator

from ..limits import Limits
from .calls import Call, Line, Timers
from .status import KEY, Changes, Code, Missing, Status, name_gone

_INT64 = 2**63


def normalise(key: str) -> str:
    """Drops leading, trailing and doubled slashes, as jaxlib does: "/a//b/" is "a/b"."""
    if "/" not in key:
        return key
    return "/".join(part for part in key.split("/") if part)


class Keys:
    """Holds values by normalised key, within limits."""

    def __init__(self, limits: Limits, timers: Timers, changes: Changes) -> None:
        self._limits = limits
        self._timers = timers
        self._changes = changes
        self.values: dict[str, bytes] = {}
        self._order: list[str] = []
        self._lines: dict[str, Line] = {}  # by the key that is waited for
        self.total_bytes = 0

    def insert(self, call: Call, key: str, value: bytes, allow_overwrite: bool) -> None:
        """Sets a key and answers all calls that wait for it."""
        key = normalise(key)
        if not allow_overwrite and key in self.values:
            sentence = f"key {key} already exists. Expected a new key, or allow_overwrite"
            call.fail(Status(Code.ALREADY_EXISTS, sentence, from_service=False))
            return
        _answer(call, self.put(key, value))

    def set_many(self, call: Call, entries: Iterable[tuple[str, bytes]]) -> None:
        """Sets keys, whether they exist or not, until one cannot be."""
        refusals = (self.put(normalise(key), value) for key, value in entries)
        _answer(call, next(filter(None, refusals), None))

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
        line = self._lines.get(key)
        if line is not None:
            line.succeed((key, value))
        return None

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

    def get(self, call: Call, key: str) -> None:
        """Answers with the value, now or when it is set."""
        key = normalise(key)
        if key in self.values:
            call.succeed((key, self.values[key]))
            return
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(
                self._timers,
                late=lambda now, since: _not_set(key, now - since),
                emptied=lambda: self._lines.pop(key),
            )
        line.enter(call)

    def waiting(self) -> Iterator[tuple[str, Call]]:
        """Yields each call that waits, with its key."""
        for key, line in list(self._lines.items()):
            for call in list(line.values()):
                yield key, call

    def fail_dependents(self, lost: Missing, unnamed: Container[int] = ()) -> None:
        """Fails all calls that depend on a lost task, and those of the tasks `unnamed` that do not
        say on whom they depend.
        """
        for key, call in self.waiting():
            if lost.task_id in call.depends_on or (not call.depends_on and call.task_id in unnamed):
                sentence = f"key {key!r} will not be set: {name_gone([lost])}"
                call.fail(Status(Code.UNAVAILABLE, sentence, missing=(lost,)))

    def try_get(self, call: Call, key: str) -> None:
        """Answers at once, NOT_FOUND where there is no such key."""
        key = normalise(key)
        value = self.values.get(key)
        if value is None:
            call.refuse(Code.NOT_FOUND, f"Config key {key} not found.")
        else:
            call.succeed((key, value))

    def increment(self, call: Call, key: str, by: int) -> None:
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
            call.fail(Status(Code.FAILED_PRECONDITION, sentence, from_service=False))
            return
        value = str(number).encode()
        _answer(call, self.put(key, value), (key, value))

    def list_dir(self, call: Call, key: str) -> None:
        """Answers with all keys below a directory, in order."""
        call.succeed([(name, self.values[name]) for name in self._below(normalise(key))])

    def _below(self, key: str) -> list[str]:
        first = bisect.bisect_left(self._order, key + "/")
        return self._order[first : bisect.bisect_left(self._order, key + "0")]  # "0" follows "/"

    def delete(self, call: Call, key: str) -> None:
        """Deletes a key and all below it; it is no error if there is none."""
        key = normalise(key)
        below = self._below(key)
        if below:
            first = bisect.bisect_left(self._order, below[0])
            del self._order[first : first + len(below)]
        for name in below:
            self._drop_value(name)
        self.remove(key)
        call.succeed()

    def remove(self, key: str) -> None:
        """Deletes one normalised key, where there is one."""
        if key in self.values:
            del self._order[bisect.bisect_left(self._order, key)]
            self._drop_value(key)

    def forget(self, over: Status, task_ids: Container[int]) -> None:
        """Deletes all keys, and fails what calls of these tasks wait for."""
        for key in self._order:
            self._drop_value(key)
        self._order.clear()
        for _, call in self.waiting():
            if call.task_id in task_ids:
                call.fail(over)

    def _drop_value(self, key: str) -> None:
        self.total_bytes -= len(key) + len(self.values.pop(key))
        self._changes.mark(KEY, key)

    def load(self, values: dict[str, bytes]) -> None:
        """Loads what a journal holds."""
        self.values = dict(values)
        self._order = sorted(values)
        self.total_bytes = sum(len(key) + len(value) for key, value in values.items())


def _answer(call: Call, refusal: Status | None, value: object = None) -> None:
    """Answers a call that sets keys."""
    if refusal is None:
        call.succeed(value)
    else:
        call.fail(refusal)


def _not_set(key: str, waited_s: float) -> Status:
    sentence = f"key {key!r} was not set within {waited_s:.1f} s"
    return Status(Code.DEADLINE_EXCEEDED, sentence, from_service=False)


def _exhausted(sentence: str) -> Status:
    return Status(Code.RESOURCE_EXHAUSTED, sentence, from_service=False)

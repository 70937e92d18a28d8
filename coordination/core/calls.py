"""Calls, the lines in which they wait, and a heap of deadlines that forgets what is over. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .status import Code, Status

_SLACK = 1_000


@dataclass(slots=True, eq=False)
class Call:
    """One call of a task, from when it comes until it is answered or dropped, once.

    An answer is a `value`, or a `status` where the call failed; with it the call goes to `answers`,
    for whoever sends it.
    """

    answers: list[Call] = field(repr=False)
    task_id: int
    came: float
    incarnation: int = 0
    life: int = 0  # version of the task table when the caller's life began
    session: bool = False  # it came on a Session
    deadline: float = math.inf
    depends_on: frozenset[int] = frozenset()
    number: int = 0  # of the call, in each sending of it; 0: it is sent once
    participants: bytes = b""  # many, as bits
    done: bool = False
    value: Any = None
    status: Status | None = None
    line: Line | None = field(default=None, repr=False)
    place: Any = field(default=None, repr=False)  # in its line

    def succeed(self, value: Any = None) -> None:
        """Answers with a value."""
        self.drop()
        self.value = value
        self.answers.append(self)

    def fail(self, status: Status) -> None:
        """Answers with an error."""
        self.drop()
        self.status = status
        self.answers.append(self)

    def refuse(self, code: Code, sentence: str) -> None:
        """Answers with an error that has nothing but a sentence."""
        self.fail(Status(code, sentence))

    def drop(self) -> None:
        """Ends the call without an answer: its client has gone away."""
        self.done = True
        if self.line is not None:
            self.line.leave(self)

    def wait_until(self, deadline: float) -> None:
        """Sets when its time is over."""
        self.deadline = deadline

    def stand(self, line: Line, place: Any) -> None:
        """Notes where it waits."""
        self.line = line
        self.place = place


class Timer(Protocol):
    """Whatever can run out of time, unless it is done before."""

    @property
    def done(self) -> bool: ...

    def expire(self, now: float) -> None: ...


class Timers:
    """Calls `expire` on each timer whose time has come and that is not done."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._sweep_at = _SLACK

    def add(self, when: float, timer: Timer) -> None:
        """Keeps `timer` until `when`; infinity is never."""
        if when == math.inf:
            return
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timer))
        # Most waits end long before their time, so a heap that has grown is mostly waits that are
        # over. It is swept when it has doubled: a constant cost for each timer.
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _SLACK

    def next_due(self) -> float:
        """Returns when the next timer is due, infinity if none is."""
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def expire(self, now: float) -> None:
        """Expires all that is due."""
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if not timer.done:
                timer.expire(now)


class Line(dict[Any, Call]):
    """Calls that wait for one thing.

    `late(now, since)` returns the error of those whose time is over: one for all of them, of whom
    the first has waited since then. `emptied()` is called when the last one has gone.
    """

    __slots__ = ("_due", "_emptied", "_timed_out", "_timers")

    def __init__(
        self,
        timers: Timers | None = None,
        late: Callable[[float, float], Status] | None = None,
        emptied: Callable[[], object] | None = None,
    ) -> None:
        self._timers = timers
        self._timed_out = late
        self._emptied = emptied
        self._due = math.inf  # when the timer is

    @property
    def done(self) -> bool:
        """Whether nobody waits, so that its timer does nothing."""
        return not self

    def enter(self, call: Call) -> None:
        """Takes a call."""
        self._take(call, call)

    def replace(self, call: Call, code: Code = Code.CANCELLED) -> None:
        """Takes a call of a task in the place of the task's older one, which fails."""
        older = self.get(call.task_id)
        self._take(call, call.task_id)
        if older is not None:
            older.refuse(code, f"a newer call of process {call.task_id} took this one's place")

    def _take(self, call: Call, place: Any) -> None:
        self[place] = call
        call.stand(self, place)
        self._wind(call.deadline)

    def _wind(self, due: float) -> None:
        """Has a timer at the latest then. It knows the line alone: a call that is answered, with
        what may be 64 MiB, is nobody's any more.
        """
        if self._timers is not None and due < self._due:
            self._due = due
            self._timers.add(due, self)

    def leave(self, call: Call) -> None:
        """Lets a call go that is over."""
        if self.get(call.place) is call:
            del self[call.place]
            if not self:
                self._note_empty()

    def _note_empty(self) -> None:
        self._due = math.inf
        if self._emptied is not None:
            self._emptied()

    def succeed(self, value: Any = None) -> None:
        """Answers all with one value."""
        for call in self._take_all():
            call.succeed(value)

    def fail(self, status: Status) -> None:
        """Answers all with one error."""
        for call in self._take_all():
            call.fail(status)

    def _take_all(self) -> list[Call]:
        calls = list(self.values())
        self.clear()
        if calls:
            self._note_empty()
        return calls

    def expire(self, now: float) -> None:
        """Fails those whose time is over."""
        if now < self._due:
            return
        self._due = math.inf
        due = [call for call in self.values() if call.deadline <= now]
        if due:
            self.time_out(due, now)
        self._wind(min((call.deadline for call in self.values()), default=math.inf))

    def time_out(self, due: Sequence[Call], now: float) -> None:
        """Fails calls whose time is over."""
        assert self._timed_out is not None
        status = self._timed_out(now, min(call.came for call in due))
        for call in due:
            call.fail(status)

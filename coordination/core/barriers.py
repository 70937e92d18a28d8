"""Points that a set of tasks pass together. Pure.

A barrier has a name, its participants (fixed by whoever comes first) and a counter of instances. An instance is over when all have come
(passed), when its time is over, when a participant is lost, or when it is cancelled (failed); its result stays, and is replayed to
whoever asks again with its counter.

    call with counter          no such barrier   instance `have` open   instance `have` over
    0                          opens             |                      |
    have                       -                 arrives                replays the result
    have - 1, had come to it   -                 replays that result    replays that result
    have + 1                   -                 refused                opens the next
    other                      refused           refused                refused
    0, recoverable, new life   opens             arrives                opens the next

"refused" is INTERNAL with a BarrierError that holds the service's counter, from which the caller resynchronises. A bad request harms
its sender alone: it never fails the barrier for the others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..limits import Limits
from .status import Code, Completion, Status, name_processes
from .task_table import TaskTable
from .timers import Timers


@dataclass(slots=True)
class Past:
    """The result of the instance before, for those who came to it and lost the answer while others came to the next."""

    counter: int
    refusal: Status | None
    came: dict[int, int]  # task: its incarnation


@dataclass(slots=True)
class Barrier:
    """The latest instance of one barrier."""

    name: str
    participants: frozenset[int]
    counter: int
    owner: Barriers
    deadline: float = math.inf
    opened: float = 0.0
    arrived: dict[int, tuple[int, float]] = field(default_factory=dict)  # task: (its incarnation, when)
    waiting: dict[int, Any] = field(default_factory=dict)  # task: call
    former: dict[int, int] = field(default_factory=dict)  # task: its incarnation at earlier instances, in a recoverable job
    past: Past | None = None
    refusal: Status | None = None
    done: bool = False

    def expire(self, now: float) -> None:
        """Fails the instance: its time is over."""
        self.owner.time_out(self, now)

    def missing(self) -> frozenset[int]:
        """Returns the participants that have not come."""
        return self.participants.difference(self.arrived)


@dataclass(slots=True)
class Arrival:
    """A call of Barrier."""

    call: Any
    task_id: int
    incarnation: int
    name: str
    counter: int
    deadline: float
    participants: frozenset[int]  # empty: all


class Barriers:
    """Holds all barriers of a job. Replies go to `replies`; names of those that changed, to `dirty`."""

    def __init__(self, limits: Limits, roster: TaskTable, timers: Timers, replies: list[Completion], recoverable: bool) -> None:
        self._limits, self._roster, self._timers, self._replies = limits, roster, timers, replies
        self._recoverable = recoverable
        self.open: dict[str, Barrier] = {}
        self.over: OrderedDict[str, Barrier] = OrderedDict()
        self.forgotten = False  # whether results have been let go, so that a name may be new to us and have a counter
        self.dirty: set[str] = set()
        self.passed = self.failed = 0

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Lets a task come to a barrier; its call is answered when the instance is over."""
        barrier = self.open.get(arrival.name)
        if barrier is None:
            barrier = self._open_or_answer(arrival, now)
            if barrier is None:
                return
        elif self._answer_past(barrier, arrival):
            return
        elif barrier.counter != arrival.counter and not self._is_new_life(barrier, arrival):
            self._refuse(arrival, _counter_mismatch(barrier, arrival.counter))
            return
        elif (refusal := self._outsider(barrier, arrival)) is not None:
            self._refuse(arrival, refusal)
            return
        self._enter(barrier, arrival, now)

    def _enter(self, barrier: Barrier, arrival: Arrival, now: float) -> None:
        task_id = arrival.task_id
        older = barrier.waiting.get(task_id)
        if older is not None:
            sentence = f"barrier {barrier.name!r}: a newer call of process {task_id} took this one's place"
            self._replies.append(Completion(older, None, Status(Code.CANCELLED, sentence)))
        if task_id not in barrier.arrived:
            barrier.arrived[task_id] = (arrival.incarnation, now)
            self.dirty.add(barrier.name)
        barrier.waiting[task_id] = arrival.call
        if len(barrier.arrived) == len(barrier.participants):
            self._finish(barrier, None)

    def _outsider(self, barrier: Barrier, arrival: Arrival) -> Status | None:
        named = arrival.participants or self._roster.everyone
        if named is not barrier.participants and named != barrier.participants:  # comparing costs as many steps as there are tasks
            sentence = (
                f"barrier {barrier.name!r} is one of {_some(barrier.participants)}; process {arrival.task_id} came with {_some(named)}"
            )
            return Status(Code.INVALID_ARGUMENT, sentence, barrier=(barrier.name, barrier.counter))
        if arrival.task_id not in named:
            return _not_among(arrival, named, barrier.counter)
        return None

    def _open_or_answer(self, arrival: Arrival, now: float) -> Barrier | None:
        """Opens an instance, or answers without one: a replay or a refusal."""
        over = self.over.get(arrival.name)
        if over is not None and self._answer_past(over, arrival):
            return None
        refusal = self._may_open(over, arrival, now)
        if refusal is not None:
            self._refuse(arrival, refusal)
            return None
        if over is not None and self._is_replay(over, arrival):
            if self._recoverable and arrival.task_id not in over.arrived:
                over.former[arrival.task_id] = arrival.incarnation
                self.dirty.add(over.name)
            self._replies.append(Completion(arrival.call, over.counter, over.refusal))
            return None
        counter = arrival.counter if over is None else over.counter + 1
        participants = arrival.participants or self._roster.everyone
        barrier = Barrier(
            arrival.name, participants, counter, self, arrival.deadline, now, former=self._former(over), past=self._past(over)
        )
        if not self._roster.lost.isdisjoint(participants):
            barrier.arrived[arrival.task_id], barrier.waiting[arrival.task_id] = (arrival.incarnation, now), arrival.call
            self._finish(barrier, self._lost_refusal(barrier, now))
            return None
        self.open[arrival.name] = barrier
        self.over.pop(arrival.name, None)
        self._timers.add(arrival.deadline, barrier)
        return barrier

    def _may_open(self, over: Barrier | None, arrival: Arrival, now: float) -> Status | None:
        named = arrival.participants or self._roster.everyone
        if over is not None and (refusal := self._outsider(over, arrival)) is not None:
            return refusal
        if arrival.task_id not in named:
            return _not_among(arrival, named, 0)
        if not named <= self._roster.everyone:
            sentence = f"barrier {arrival.name!r} names {_some(named - self._roster.everyone)}; the job has 0 to {len(self._roster) - 1}"
            return Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, 0))
        if over is None:
            if arrival.counter != 0 and not self.forgotten:
                return _counter_mismatch(Barrier(arrival.name, named, 0, self), arrival.counter)
            return self._too_much(arrival.name)
        if arrival.counter not in (over.counter, over.counter + 1) and not self._is_new_life(over, arrival):
            return _counter_mismatch(over, arrival.counter)
        return None

    def _is_replay(self, over: Barrier, arrival: Arrival) -> bool:
        came = over.arrived.get(arrival.task_id)
        same_life = came is not None and came[0] == arrival.incarnation
        if arrival.counter == over.counter:
            return not self._recoverable or came is None or same_life
        return self._is_new_life(over, arrival) and same_life  # what it came with as 0 was counted here

    def _answer_past(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Replays the instance before to one who came to it; in a recoverable job it may have come as a new life, with 0."""
        past = barrier.past
        if past is None or arrival.counter == barrier.counter or past.came.get(arrival.task_id) != arrival.incarnation:
            return False
        if arrival.counter != past.counter and not (self._recoverable and arrival.counter == 0):
            return False
        self._replies.append(Completion(arrival.call, past.counter, past.refusal))
        return True

    @staticmethod
    def _past(over: Barrier | None) -> Past | None:
        if over is None:
            return None
        return Past(over.counter, over.refusal, {task_id: incarnation for task_id, (incarnation, _) in over.arrived.items()})

    def _is_new_life(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Says whether a counter of 0 is a restarted task's, not a late sending of one that came to an earlier instance in this life."""
        return self._recoverable and arrival.counter == 0 and barrier.former.get(arrival.task_id) != arrival.incarnation

    def _former(self, over: Barrier | None) -> dict[int, int]:
        if over is None or not self._recoverable:
            return {}
        return over.former | {task_id: incarnation for task_id, (incarnation, _) in over.arrived.items()}

    def _too_much(self, name: str) -> Status | None:
        if len(name.encode()) > self._limits.barrier_name_bytes:
            found, most = f"a barrier name of {len(name.encode())} bytes", self._limits.barrier_name_bytes
        elif len(self.open) >= self._limits.barriers_open:
            found, most = f"{len(self.open)} barriers are waited at", self._limits.barriers_open
        else:
            return None
        return Status(Code.RESOURCE_EXHAUSTED, f"{found}; expected at most {most}", barrier=(name[:100], 0))

    def _refuse(self, arrival: Arrival, refusal: Status) -> None:
        self._replies.append(Completion(arrival.call, None, refusal))

    def _finish(self, barrier: Barrier, refusal: Status | None) -> None:
        barrier.done, barrier.refusal = True, refusal
        if refusal is None:
            self.passed += 1
        else:
            self.failed += 1
        self.open.pop(barrier.name, None)
        self.over[barrier.name] = barrier
        self.dirty.add(barrier.name)
        counter = barrier.counter
        self._replies += [Completion(call, counter, refusal) for call in barrier.waiting.values()]
        barrier.waiting = {}
        while len(self.over) > self._limits.barriers_kept:
            self.dirty.add(self.over.popitem(last=False)[0])
            self.forgotten = True

    def time_out(self, barrier: Barrier, now: float) -> None:
        """Fails an instance whose time is over, naming all who have not come."""
        missing = self._roster.missing(barrier.missing(), now)
        sentence = f"{_came(barrier)}, missing {name_processes(missing)}; waited {now - barrier.opened:.1f} s"
        self._finish(barrier, Status(Code.DEADLINE_EXCEEDED, sentence, barrier=(barrier.name, barrier.counter), missing=missing))

    def _lost_refusal(self, barrier: Barrier, now: float) -> Status:
        missing = self._roster.missing(barrier.participants & self._roster.lost, now)
        sentence = f"{_came(barrier)}; it can never be passed: {name_processes(missing)} {'is' if len(missing) == 1 else 'are'} lost"
        return Status(Code.INTERNAL, sentence, barrier=(barrier.name, barrier.counter), missing=missing)

    def fail_lost(self, task_id: int, now: float) -> None:
        """Fails all open instances that a lost task takes part in, even those it has come to."""
        for barrier in [each for each in self.open.values() if task_id in each.participants]:
            self._finish(barrier, self._lost_refusal(barrier, now))

    def fail_all(self, refusal: Status) -> None:
        """Fails all open instances for one reason."""
        for barrier in list(self.open.values()):
            self._finish(barrier, refusal)

    def cancel(self, call: Any, task_id: int, name: str, counter: int, now: float) -> None:
        """Fails an instance for all its participants, those too who have yet to come."""
        barrier = self.open.get(name) or self.over.get(name)
        if barrier is None:
            barrier = Barrier(name, self._roster.everyone, counter, self, opened=now)
        elif barrier.done and counter == barrier.counter + 1:
            barrier = Barrier(name, barrier.participants, counter, self, opened=now, former=self._former(barrier), past=self._past(barrier))
        refusal = self._no_cancel(barrier, task_id, counter)
        if refusal is None:
            sentence = f"barrier {name!r} was cancelled by process {task_id}; {_came(barrier)}"
            self._finish(barrier, Status(Code.CANCELLED, sentence, barrier=(name, counter)))
        self._replies.append(Completion(call, None, refusal))

    def _no_cancel(self, barrier: Barrier, task_id: int, counter: int) -> Status | None:
        if barrier.counter != counter:
            return _counter_mismatch(barrier, counter)
        if barrier.done:
            sentence = f"barrier {barrier.name!r} is over already"
            return Status(Code.FAILED_PRECONDITION, sentence, barrier=(barrier.name, counter))
        if task_id not in barrier.participants:
            sentence = f"process {task_id} takes no part in barrier {barrier.name!r}"
            return Status(Code.INVALID_ARGUMENT, sentence, barrier=(barrier.name, counter))
        return self._too_much(barrier.name)

    def counter_for(self, name: str, task_id: int) -> int:
        """Returns the counter of a task's next call, for profiles that send none."""
        over = self.over.get(name)
        if name in self.open or over is None:
            return self.open[name].counter if name in self.open else 0
        return over.counter + (task_id in over.arrived)

    def load(self, barriers: Iterable[Barrier]) -> None:
        """Takes over what a journal holds."""
        for barrier in barriers:
            if barrier.done:
                self.over[barrier.name] = barrier
            else:
                self.open[barrier.name] = barrier
                self._timers.add(barrier.deadline, barrier)


def _came(barrier: Barrier) -> str:
    return f"{len(barrier.arrived)} of {len(barrier.participants)} at {barrier.name!r}"


def _some(task_ids: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(task_ids)[:40]))
    return f"processes {shown}" + (f" and {len(task_ids) - 40} more" if len(task_ids) > 40 else "")


def _counter_mismatch(barrier: Barrier, found: int) -> Status:
    sentence = f"barrier {barrier.name!r}: counter mismatch: expected {barrier.counter}, found {found}"
    return Status(Code.INTERNAL, sentence, barrier=(barrier.name, barrier.counter))


def _not_among(arrival: Arrival, named: frozenset[int], counter: int) -> Status:
    sentence = f"process {arrival.task_id} takes no part in barrier {arrival.name!r}: it is one of {_some(named)}"
    return Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, counter))

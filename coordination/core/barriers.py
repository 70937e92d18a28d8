"""Barriers: points that a set of tasks pass together. Pure.

A barrier has a name, its participants (fixed by the first to arrive) and a counter of instances. An instance is over when all have arrived
(passed), when its time is over, when a participant is lost, or when it is cancelled (failed); its result stays, and is replayed to
a caller that asks again with its counter.

    call with counter          no such barrier   instance `have` open   instance `have` over
    0                          opens             |                      |
    have                       -                 arrives                replays the result
    have - 1, arrived at it    -                 replays that result    replays that result
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
class PreviousInstance:
    """The result of the instance before, for tasks that arrived at it and lost the answer while others arrived at the next."""

    counter: int
    status: Status | None
    arrived: dict[int, int]  # task: its incarnation


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
    previous: PreviousInstance | None = None
    status: Status | None = None
    done: bool = False

    def expire(self, now: float) -> None:
        """Fails the instance: its time is over."""
        self.owner.time_out(self, now)

    def missing(self) -> frozenset[int]:
        """Returns the participants that have not arrived."""
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
    """Holds all barriers of a job. Completions go to `completions`; names of barriers that changed, to `dirty`."""

    def __init__(self, limits: Limits, task_table: TaskTable, timers: Timers, completions: list[Completion], recoverable: bool) -> None:
        self._limits, self._task_table, self._timers, self._completions = limits, task_table, timers, completions
        self._recoverable = recoverable
        self.open: dict[str, Barrier] = {}
        self.finished: OrderedDict[str, Barrier] = OrderedDict()
        self.forgotten = False  # whether results have been dropped, so that a new name may have a counter
        self.dirty: set[str] = set()
        self.passed = self.failed = 0

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Lets a task arrive at a barrier; its call is answered when the instance is over."""
        barrier = self.open.get(arrival.name)
        if barrier is None:
            barrier = self._open_or_answer(arrival, now)
            if barrier is None:
                return
        elif self._replay_previous(barrier, arrival):
            return
        elif barrier.counter != arrival.counter and not self._is_new_life(barrier, arrival):
            self._refuse(arrival, _counter_mismatch(barrier, arrival.counter))
            return
        elif (status := self._outsider(barrier, arrival)) is not None:
            self._refuse(arrival, status)
            return
        self._enter(barrier, arrival, now)

    def _enter(self, barrier: Barrier, arrival: Arrival, now: float) -> None:
        task_id = arrival.task_id
        older = barrier.waiting.get(task_id)
        if older is not None:
            sentence = f"barrier {barrier.name!r}: a newer call of process {task_id} took this one's place"
            self._completions.append(Completion(older, None, Status(Code.CANCELLED, sentence)))
        if task_id not in barrier.arrived:
            barrier.arrived[task_id] = (arrival.incarnation, now)
            self.dirty.add(barrier.name)
        barrier.waiting[task_id] = arrival.call
        if len(barrier.arrived) == len(barrier.participants):
            self._finish(barrier, None)

    def _outsider(self, barrier: Barrier, arrival: Arrival) -> Status | None:
        named = arrival.participants or self._task_table.everyone
        if named is not barrier.participants and named != barrier.participants:  # comparing costs as many steps as there are tasks
            sentence = (
                f"barrier {barrier.name!r} is one of {_some(barrier.participants)}; process {arrival.task_id} came with {_some(named)}"
            )
            return Status(Code.INVALID_ARGUMENT, sentence, barrier=(barrier.name, barrier.counter))
        if arrival.task_id not in named:
            return _not_among(arrival, named, barrier.counter)
        return None

    def _open_or_answer(self, arrival: Arrival, now: float) -> Barrier | None:
        """Opens an instance, or answers without one: with a replay or an error."""
        finished = self.finished.get(arrival.name)
        if finished is not None and self._replay_previous(finished, arrival):
            return None
        status = self._may_open(finished, arrival, now)
        if status is not None:
            self._refuse(arrival, status)
            return None
        if finished is not None and self._is_replay(finished, arrival):
            if self._recoverable and arrival.task_id not in finished.arrived:
                finished.former[arrival.task_id] = arrival.incarnation
                self.dirty.add(finished.name)
            self._completions.append(Completion(arrival.call, finished.counter, finished.status))
            return None
        counter = arrival.counter if finished is None else finished.counter + 1
        participants = arrival.participants or self._task_table.everyone
        barrier = self._next(finished, Barrier(arrival.name, participants, counter, self, arrival.deadline, now))
        if not self._task_table.lost.isdisjoint(participants):
            barrier.arrived[arrival.task_id], barrier.waiting[arrival.task_id] = (arrival.incarnation, now), arrival.call
            self._finish(barrier, self._lost_status(barrier, now))
            return None
        self.open[arrival.name] = barrier
        self.finished.pop(arrival.name, None)
        self._timers.add(arrival.deadline, barrier)
        return barrier

    def _may_open(self, finished: Barrier | None, arrival: Arrival, now: float) -> Status | None:
        named = arrival.participants or self._task_table.everyone
        if finished is not None and (status := self._outsider(finished, arrival)) is not None:
            return status
        if arrival.task_id not in named:
            return _not_among(arrival, named, 0)
        if not named <= self._task_table.everyone:
            sentence = (
                f"barrier {arrival.name!r} names {_some(named - self._task_table.everyone)}; the job has 0 to {len(self._task_table) - 1}"
            )
            return Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, 0))
        if finished is None:
            if arrival.counter != 0 and not self.forgotten:
                return _counter_mismatch(Barrier(arrival.name, named, 0, self), arrival.counter)
            return self._too_much(arrival.name)
        if arrival.counter not in (finished.counter, finished.counter + 1) and not self._is_new_life(finished, arrival):
            return _counter_mismatch(finished, arrival.counter)
        return None

    def _is_replay(self, finished: Barrier, arrival: Arrival) -> bool:
        earlier = finished.arrived.get(arrival.task_id)
        same_life = earlier is not None and earlier[0] == arrival.incarnation
        if arrival.counter == finished.counter:
            return not self._recoverable or earlier is None or same_life
        return self._is_new_life(finished, arrival) and same_life  # what it sent as 0 was counted here

    def _replay_previous(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Replays the instance before to a task that arrived at it; in a recoverable job it may have arrived as a new life, with 0."""
        previous = barrier.previous
        if previous is None or arrival.counter == barrier.counter or previous.arrived.get(arrival.task_id) != arrival.incarnation:
            return False
        if arrival.counter != previous.counter and not (self._recoverable and arrival.counter == 0):
            return False
        self._completions.append(Completion(arrival.call, previous.counter, previous.status))
        return True

    def _is_new_life(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Returns whether a counter of 0 is a restarted task's, not a late sending of a task that arrived earlier in this life."""
        return self._recoverable and arrival.counter == 0 and barrier.former.get(arrival.task_id) != arrival.incarnation

    def _next(self, finished: Barrier | None, barrier: Barrier) -> Barrier:
        """Returns a new instance with what it has to know of the finished one before."""
        if finished is not None:
            arrived = {task_id: incarnation for task_id, (incarnation, _) in finished.arrived.items()}
            barrier.previous = PreviousInstance(finished.counter, finished.status, arrived)
            if self._recoverable:
                barrier.former = finished.former | arrived
        return barrier

    def _too_much(self, name: str) -> Status | None:
        if len(name.encode()) > self._limits.barrier_name_bytes:
            found, most = f"a barrier name of {len(name.encode())} bytes", self._limits.barrier_name_bytes
        elif len(self.open) >= self._limits.barriers_open:
            found, most = f"{len(self.open)} barriers are waited at", self._limits.barriers_open
        else:
            return None
        return Status(Code.RESOURCE_EXHAUSTED, f"{found}; expected at most {most}", barrier=(name[:100], 0))

    def _refuse(self, arrival: Arrival, status: Status) -> None:
        self._completions.append(Completion(arrival.call, None, status))

    def _finish(self, barrier: Barrier, status: Status | None) -> None:
        barrier.done, barrier.status = True, status
        if status is None:
            self.passed += 1
        else:
            self.failed += 1
        self.open.pop(barrier.name, None)
        self.finished[barrier.name] = barrier
        self.dirty.add(barrier.name)
        counter = barrier.counter
        self._completions += [Completion(call, counter, status) for call in barrier.waiting.values()]
        barrier.waiting = {}
        while len(self.finished) > self._limits.barriers_kept:
            self.dirty.add(self.finished.popitem(last=False)[0])
            self.forgotten = True

    def time_out(self, barrier: Barrier, now: float) -> None:
        """Fails an instance whose time is over, naming all that have not arrived."""
        missing = self._task_table.missing(barrier.missing(), now)
        sentence = f"{_arrived(barrier)}, missing {name_processes(missing)}; waited {now - barrier.opened:.1f} s"
        self._finish(barrier, Status(Code.DEADLINE_EXCEEDED, sentence, barrier=(barrier.name, barrier.counter), missing=missing))

    def _lost_status(self, barrier: Barrier, now: float) -> Status:
        missing = self._task_table.missing(barrier.participants & self._task_table.lost, now)
        sentence = f"{_arrived(barrier)}; it can never be passed: {name_processes(missing)} {'is' if len(missing) == 1 else 'are'} lost"
        return Status(Code.INTERNAL, sentence, barrier=(barrier.name, barrier.counter), missing=missing)

    def fail_lost(self, task_id: int, now: float) -> None:
        """Fails all open instances that a lost task takes part in, even those at which it has arrived."""
        for barrier in [each for each in self.open.values() if task_id in each.participants]:
            self._finish(barrier, self._lost_status(barrier, now))

    def cancel(self, call: Any, task_id: int, name: str, counter: int, now: float) -> None:
        """Fails an instance for all its participants, including those that have yet to arrive."""
        barrier = self.open.get(name) or self.finished.get(name)
        if barrier is None:
            barrier = Barrier(name, self._task_table.everyone, counter, self, opened=now)
        elif barrier.done and counter == barrier.counter + 1:
            barrier = self._next(barrier, Barrier(name, barrier.participants, counter, self, opened=now))
        status = self._no_cancel(barrier, task_id, counter)
        if status is None:
            sentence = f"barrier {name!r} was cancelled by process {task_id}; {_arrived(barrier)}"
            self._finish(barrier, Status(Code.CANCELLED, sentence, barrier=(name, counter)))
        self._completions.append(Completion(call, None, status))

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
        finished = self.finished.get(name)
        if name in self.open or finished is None:
            return self.open[name].counter if name in self.open else 0
        return finished.counter + (task_id in finished.arrived)

    def load(self, barriers: Iterable[Barrier]) -> None:
        """Loads what a journal holds."""
        for barrier in barriers:
            if barrier.done:
                self.finished[barrier.name] = barrier
            else:
                self.open[barrier.name] = barrier
                self._timers.add(barrier.deadline, barrier)


def _arrived(barrier: Barrier) -> str:
    return f"{len(barrier.arrived)} of {len(barrier.participants)} at {barrier.name!r}"


def _some(task_ids: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(task_ids)[:40]))
    return f"processes {shown}" + (f" and {len(task_ids) - 40} more" if len(task_ids) > 40 else "")


def _counter_mismatch(barrier: Barrier, counter: int) -> Status:
    sentence = f"barrier {barrier.name!r}: counter mismatch: expected {barrier.counter}, found {counter}"
    return Status(Code.INTERNAL, sentence, barrier=(barrier.name, barrier.counter))


def _not_among(arrival: Arrival, named: frozenset[int], counter: int) -> Status:
    sentence = f"process {arrival.task_id} takes no part in barrier {arrival.name!r}: it is one of {_some(named)}"
    return Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, counter))

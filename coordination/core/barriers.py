"""Barriers: points that a set of tasks pass together. Pure.

A barrier has a name, its participants (fixed by the first to arrive) and a counter of instances. An
instance is over when all have arrived (passed), when its time is over, when a participant is lost,
or when it is cancelled (failed); its result stays, and is replayed to a caller that asks again with
its counter.

Callers count their calls. One whose earlier calls were lost is ahead of the others: its call is for
what comes now, and no number may be used twice, so an instance takes up all counters from the one
after the last instance's to the highest that it was called with.

    call with counter          no such barrier   instance open          instance over
    among the instance's       -                 arrives                replays the result
    the one's before, arrived  -                 replays that result    replays that result
    above                      opens             arrives, if it has not opens the next
    below                      -                 refused                refused
    0, recoverable, new life   opens             arrives                opens the next

"refused" is INTERNAL with a BarrierError that holds the highest counter, from which the caller
resynchronises: the next one fits. So no name becomes unusable. A bad request harms its sender
alone: it never fails the barrier for the others.

Thousands of results of thousands of tasks are kept, so what is over holds sets of tasks as the bits
of an int, and no time or incarnation of each: a task's life began at a version of the task table,
and so an instance that was over earlier was not its.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..limits import Limits
from ..task_bits import bits_of, tasks_of
from .calls import Call, Line, Timers
from .status import ARRIVED, BARRIER, Changes, Code, Status, beyond, name_gone
from .task_table import TaskTable

_SHOWN_CHARACTERS = 200  # of a name, in a sentence
_MOST_LOST = 1_000_000  # calls of one task, in a row; a counter that is further ahead is nonsense
_MOST_FORGOTTEN = 2**48  # the highest counter of a name that the service does not know


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an instance ended. Sets of tasks are bits."""

    first: int
    counter: int
    status: Status | None  # without those that were missing
    members: int
    came: int
    absent: int  # those that a failure is about
    ended: int  # version of the task table

    def includes(self, task_id: int, life: int) -> bool:
        """Returns whether this life of a task had arrived."""
        return bool(self.came >> task_id & 1) and life <= self.ended


@dataclass(slots=True)
class Barrier:
    """The latest instance of one barrier; `arrived`, `waiting` and `participants` are empty once it
    is over.
    """

    name: str
    participants: frozenset[int]
    first: int
    counter: int  # the highest that it was called with
    owner: Barriers
    deadline: float = math.inf
    opened: float = 0.0
    began: int = 0  # version of the task table
    # task: (when its life began, when it came)
    arrived: dict[int, tuple[int, float]] = field(default_factory=dict)
    waiting: Line = field(default_factory=Line)
    # tasks that knew an earlier instance, in the life that they had at `began`; of a recoverable
    # job
    former: int = 0
    told: int = 0  # tasks that learned the result without having arrived
    previous: Outcome | None = None
    outcome: Outcome | None = None
    renumbered: bool = True  # the journal has yet to write its row
    unwritten: list[int] = field(default_factory=list)  # arrivals that the journal has yet to write
    parts: int = 0  # rows of arrivals that the journal has

    @property
    def done(self) -> bool:
        """Returns whether the instance is over."""
        return self.outcome is not None

    def expire(self, now: float) -> None:
        """Fails the instance: its time is over."""
        self.owner.time_out(self, now)

    def missing(self) -> frozenset[int]:
        """Returns the participants that have not arrived."""
        return self.participants.difference(self.arrived)

    def enter(self, arrival: Arrival) -> None:
        """Notes that a task has arrived."""
        self.arrived[arrival.task_id] = (arrival.life, arrival.call.came)
        self.unwritten.append(arrival.task_id)
        if arrival.counter > self.counter:
            self.counter = arrival.counter
            self.renumbered = True

    def note_told(self, task_id: int) -> None:
        """Notes that a task has learned the result without having arrived."""
        self.told |= 1 << task_id

    def end(self, outcome: Outcome) -> None:
        """Keeps how the instance ended, and drops what only an open one needs."""
        self.outcome = outcome
        self.waiting = Line()  # one that was long keeps its memory
        self.arrived = {}
        self.unwritten = []
        self.participants = frozenset()

    def row_key(self, number: int) -> str:
        """Returns the key of one row of arrivals in the journal."""
        return f"{self.first}/{number}/{self.name}"

    def note_written(self) -> None:
        """Notes that the journal has all rows of the instance."""
        self.renumbered = False
        if self.unwritten:
            self.parts += 1
            self.unwritten = []

    def touch(self) -> None:
        """Has a journal that begins anew write all rows of the instance."""
        self.renumbered = True
        self.unwritten = list(self.arrived)
        self.parts = 0

    def load_part(self, arrived: dict[int, tuple[int, float]]) -> None:
        """Puts in one row of arrivals that a journal holds."""
        self.arrived |= arrived
        self.parts += 1


@dataclass(slots=True)
class Arrival:
    """A call of Barrier."""

    call: Call
    name: str
    counter: int
    participants: frozenset[int] = frozenset()  # none: all

    @property
    def task_id(self) -> int:
        """The task that calls."""
        return self.call.task_id

    @property
    def life(self) -> int:
        """The version of the task table when the caller's life began."""
        return self.call.life


class Barriers:
    """Holds all barriers of a job."""

    def __init__(
        self,
        limits: Limits,
        task_table: TaskTable,
        timers: Timers,
        changes: Changes,
        *,
        recoverable: bool,
    ) -> None:
        self._limits = limits
        self._task_table = task_table
        self._timers = timers
        self._changes = changes
        self._recoverable = recoverable
        self._everyone = bits_of(task_table.everyone)
        self.open: dict[str, Barrier] = {}
        self.finished: OrderedDict[str, Barrier] = OrderedDict()
        self._replayed: tuple[Outcome | None, float, Status | None] = (None, 0.0, None)
        self.passed = 0
        self.failed = 0

    # --- Arrivals

    def arrive(self, arrival: Arrival) -> None:
        """Lets a task arrive at a barrier; its call is answered when the instance is over."""
        barrier = self.open.get(arrival.name)
        if barrier is None:
            barrier = self._open_or_answer(arrival)
            if barrier is None:
                return
        elif self._replay_previous(barrier, arrival):
            return
        elif not self._belongs(barrier, arrival):
            arrival.call.fail(_counter_mismatch(barrier.name, barrier.counter, arrival.counter))
            return
        elif (refusal := self._outsider(barrier, arrival)) is not None:
            arrival.call.fail(refusal)
            return
        self._enter(barrier, arrival)

    def _belongs(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Returns whether a call is for the open instance."""
        if arrival.counter > barrier.counter:
            return (
                arrival.task_id not in barrier.arrived
                and arrival.counter <= barrier.counter + _MOST_LOST
            )
        return arrival.counter >= barrier.first or self._is_new_life(barrier, arrival)

    def _enter(self, barrier: Barrier, arrival: Arrival) -> None:
        if arrival.task_id not in barrier.arrived:
            barrier.enter(arrival)
            self._changes.mark(BARRIER, barrier.name)
        barrier.waiting.replace(arrival.call)
        if len(barrier.arrived) == len(barrier.participants):
            self._finish(barrier, None)

    def _named(self, arrival: Arrival) -> frozenset[int]:
        return arrival.participants or self._task_table.everyone

    def _outsider(self, barrier: Barrier, arrival: Arrival) -> Status | None:
        named = self._named(arrival)
        outcome = barrier.outcome
        if outcome is not None and not outcome.first and not outcome.came:
            alike = True  # a cancel came first, which names nobody
        elif outcome is not None:
            alike = self._bits(named) == outcome.members
        else:
            # Identity first: to compare two sets costs as many steps as there are tasks, for each
            # of them.
            alike = named is barrier.participants or named == barrier.participants
        if not alike:
            participants = barrier.participants if outcome is None else tasks_of(outcome.members)
            why = (
                f"It is one of {_some(participants)}; process {arrival.task_id} came with"
                f" {_some(named)}"
            )
            return _conflict(barrier.name, barrier.counter, why)
        if arrival.task_id not in named:
            return _not_among(arrival, named, barrier.counter)
        return None

    def _bits(self, task_ids: frozenset[int]) -> int:
        """Returns a set as bits; -1, which is no set's, where it names who is none of the job's."""
        everyone = self._task_table.everyone
        if task_ids is everyone:
            return self._everyone
        return bits_of(task_ids) if task_ids <= everyone else -1

    def _open_or_answer(self, arrival: Arrival) -> Barrier | None:
        """Opens an instance, or answers without one: with a replay or an error."""
        finished = self.finished.get(arrival.name)
        if finished is not None and self._replay_previous(finished, arrival):
            return None
        refusal = self._may_open(finished, arrival)
        if refusal is not None:
            arrival.call.fail(refusal)
            return None
        if finished is not None and self._is_replay(finished, arrival):
            self._replay(finished, arrival)
            return None
        return self._open(finished, arrival)

    def _open(self, finished: Barrier | None, arrival: Arrival) -> Barrier | None:
        barrier = self._next(finished, arrival)
        if not self._task_table.lost.isdisjoint(barrier.participants):
            barrier.enter(arrival)
            barrier.waiting.enter(arrival.call)
            self._fail_lost(barrier, arrival.call.came)
            return None
        self.open[arrival.name] = barrier
        self.finished.pop(arrival.name, None)
        self._timers.add(barrier.deadline, barrier)
        return barrier

    def _next(self, finished: Barrier | None, arrival: Arrival) -> Barrier:
        """Returns the instance after a finished one, at which nobody has arrived."""
        first = 0 if finished is None else finished.counter + 1
        return Barrier(
            arrival.name,
            self._named(arrival),
            first,
            max(first, arrival.counter),
            owner=self,
            deadline=arrival.call.deadline,
            opened=arrival.call.came,
            began=self._task_table.version,
            **self._left_by(finished),
        )

    def _may_open(self, finished: Barrier | None, arrival: Arrival) -> Status | None:
        named = self._named(arrival)
        if finished is not None and (status := self._outsider(finished, arrival)) is not None:
            return status
        if arrival.task_id not in named:
            return _not_among(arrival, named, arrival.counter)
        if not named <= self._task_table.everyone:
            return _unknown(arrival, named - self._task_table.everyone, len(self._task_table))
        counter = arrival.counter
        if finished is None:
            if 0 <= counter <= _MOST_FORGOTTEN:
                return self._too_much(arrival.name)
            return _counter_mismatch(arrival.name, 0, counter)
        fits = finished.first <= counter <= finished.counter + _MOST_LOST
        if fits or self._is_new_life(finished, arrival):
            return None
        return _counter_mismatch(arrival.name, finished.counter, counter)

    def _left_by(self, finished: Barrier | None) -> dict[str, Any]:
        """Returns what a new instance has to know of the finished one before."""
        if finished is None:
            return {}
        outcome = finished.outcome
        assert outcome is not None
        former = 0
        if self._recoverable:
            begun_until = self._task_table.begun_until
            knew_of_earlier = finished.former & begun_until(finished.began)
            knew_of_this = (outcome.came | finished.told) & begun_until(outcome.ended)
            former = knew_of_earlier | knew_of_this
        return {"previous": outcome, "former": former}

    # --- Replays

    def _is_replay(self, finished: Barrier, arrival: Arrival) -> bool:
        assert finished.outcome is not None
        if finished.first <= arrival.counter <= finished.counter:
            return not self._recoverable or arrival.life <= finished.outcome.ended
        # what a new life sent as 0 was counted here
        return self._is_new_life(finished, arrival) and finished.outcome.includes(
            arrival.task_id, arrival.life
        )

    def _is_new_life(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Returns whether a counter of 0 is a restarted task's, not a late sending of a task that
        arrived earlier in this life.
        """
        if not self._recoverable or arrival.counter != 0:
            return False
        outcome = barrier.outcome
        was_told = outcome is not None and arrival.life <= outcome.ended
        if was_told and barrier.told >> arrival.task_id & 1:
            return False
        return not (barrier.former >> arrival.task_id & 1 and arrival.life <= barrier.began)

    def _replay(self, finished: Barrier, arrival: Arrival) -> None:
        assert finished.outcome is not None
        if self._recoverable and not finished.outcome.came >> arrival.task_id & 1:
            finished.note_told(arrival.task_id)
            self._changes.mark(BARRIER, finished.name)
        self._answer(finished.outcome, arrival.call)

    def _replay_previous(self, barrier: Barrier, arrival: Arrival) -> bool:
        """Replays the instance before to a task that arrived at it; in a recoverable job it may
        have arrived as a new life, with 0.
        """
        previous = barrier.previous
        if previous is None or arrival.counter >= barrier.first:
            return False
        if not previous.includes(arrival.task_id, arrival.life):
            return False
        among = previous.first <= arrival.counter <= previous.counter
        if not among and not (self._recoverable and arrival.counter == 0):
            return False
        self._answer(previous, arrival.call)
        return True

    def _answer(self, outcome: Outcome, call: Call) -> None:
        """Answers with an earlier result, which names the same processes as it did then. Thousands
        that come late get one status.
        """
        latest, at, status = self._replayed
        if latest is not outcome or at != call.came:
            status = self._named_anew(outcome, call.came)
            self._replayed = (outcome, call.came, status)
        if status is None:
            call.succeed(outcome.counter)
        else:
            call.fail(status)

    def _named_anew(self, outcome: Outcome, now: float) -> Status | None:
        status = outcome.status
        if status is not None and outcome.absent:
            absent = tasks_of(outcome.absent)
            missing = self._task_table.missing(absent, now)
            if status.code is Code.INTERNAL:
                missing = tuple(replace(each, lost=True) for each in missing)
            status = replace(status, missing=missing, absent=beyond(missing, absent))
        return status

    # --- Refusals

    def _too_much(self, name: str) -> Status | None:
        limits = self._limits
        nbytes = len(name.encode())
        if nbytes > limits.barrier_name_bytes:
            sentence = (
                f"a barrier name of {nbytes} bytes; expected at most {limits.barrier_name_bytes}"
            )
        elif len(self.open) >= limits.barriers_open:
            sentence = (
                f"{len(self.open)} barriers are waited at; expected at most {limits.barriers_open}"
            )
        else:
            return None
        return Status(Code.RESOURCE_EXHAUSTED, sentence, barrier=(name[:100], 0))

    # --- Ends

    def _finish(self, barrier: Barrier, status: Status | None) -> None:
        if status is None:
            self.passed += 1
            barrier.waiting.succeed(barrier.counter)
        else:
            self.failed += 1
            barrier.waiting.fail(status)
        barrier.end(self._outcome(barrier, status))
        self.open.pop(barrier.name, None)
        self.finished[barrier.name] = barrier
        self._changes.mark(BARRIER, barrier.name)
        for number in range(barrier.parts):
            self._changes.mark(ARRIVED, barrier.row_key(number))
        while len(self.finished) > self._limits.barriers_kept:
            self._changes.mark(BARRIER, self.finished.popitem(last=False)[0])

    def _outcome(self, barrier: Barrier, status: Status | None) -> Outcome:
        members = self._bits(barrier.participants)
        came = members
        absent = 0
        if status is not None:
            came = bits_of(barrier.arrived)
            absent = status.absent or bits_of(missing.task_id for missing in status.missing)
            # which would grow with every result that is kept
            status = replace(status, missing=(), absent=0)
        return Outcome(
            barrier.first,
            barrier.counter,
            status,
            members=members,
            came=came,
            absent=absent,
            ended=self._task_table.version,
        )

    def time_out(self, barrier: Barrier, now: float) -> None:
        """Fails an instance whose time is over, naming all that have not arrived."""
        what = f"Barrier timed out. Id: {barrier.name[:_SHOWN_CHARACTERS]}::{barrier.counter}."
        status = self._task_table.lacking(
            Code.DEADLINE_EXCEEDED,
            f"{what} {_arrived(barrier)}, missing",
            barrier.missing(),
            now,
            f"; waited {now - barrier.opened:.1f} s",
            barrier=(barrier.name, barrier.counter),
        )
        self._task_table.events.note("barrier", status.message, now)
        self._finish(barrier, status)

    def _fail_lost(self, barrier: Barrier, now: float) -> None:
        lost = barrier.participants & self._task_table.lost
        missing = self._task_table.missing(lost, now)
        sentence = f"{_arrived(barrier)}; it can never be passed: {name_gone(missing, len(lost))}"
        status = Status(
            Code.INTERNAL,
            sentence,
            barrier=(barrier.name, barrier.counter),
            missing=missing,
            absent=beyond(missing, lost),
        )
        self._finish(barrier, status)

    def fail_lost(self, task_id: int, now: float) -> None:
        """Fails all open instances that a lost task takes part in, even those at which it has
        arrived.
        """
        for barrier in [each for each in self.open.values() if task_id in each.participants]:
            self._fail_lost(barrier, now)

    def fail_replaced(self, task_id: int, life: int) -> None:
        """Fails all open instances at which an agent has arrived whose process has made another
        one: its arrival is nobody's any more.
        """
        for barrier in list(self.open.values()):
            arrived_life, _ = barrier.arrived.get(task_id, (-1, 0.0))
            if arrived_life != life:
                continue
            sentence = (
                f"{_arrived(barrier)}; it can never be passed: process {task_id} arrived with a"
                " client that another has replaced"
            )
            at = (barrier.name, barrier.counter)
            self._finish(barrier, Status(Code.INTERNAL, sentence, barrier=at))

    def cancel(self, call: Call, name: str, counter: int) -> None:
        """Fails an instance for all its participants, including those that have yet to arrive."""
        barrier = self.open.get(name) or self.finished.get(name)
        if barrier is None or (barrier.outcome is not None and counter > barrier.counter):
            members = 0 if barrier is None or barrier.outcome is None else barrier.outcome.members
            highest = _MOST_LOST if barrier is None else barrier.counter + 1 + _MOST_LOST
            named = Arrival(call, name, min(counter, highest), tasks_of(members))
            barrier = self._next(barrier, named)
        if not self._was_cancelled(barrier, counter):
            refusal = self._no_cancel(barrier, call.task_id, counter)
            if refusal is not None:
                call.fail(refusal)
                return
            who = f"was cancelled by process {call.task_id}"
            sentence = f"barrier {_shown(name)} {who}; {_arrived(barrier)}"
            self._finish(barrier, Status(Code.CANCELLED, sentence, barrier=(name, barrier.counter)))
        call.succeed()

    def _was_cancelled(self, barrier: Barrier, counter: int) -> bool:
        """Returns whether a call asks for what is done: its answer was lost, and it came again."""
        status = None if barrier.outcome is None else barrier.outcome.status
        return status is not None and status.code is Code.CANCELLED and counter >= barrier.first

    def _no_cancel(self, barrier: Barrier, task_id: int, counter: int) -> Status | None:
        if counter < barrier.first:
            return _counter_mismatch(barrier.name, barrier.counter, counter)
        if barrier.done:
            sentence = f"barrier {_shown(barrier.name)} is over already"
            return Status(Code.FAILED_PRECONDITION, sentence, barrier=(barrier.name, counter))
        if task_id not in barrier.participants:
            sentence = f"process {task_id} takes no part in barrier {_shown(barrier.name)}"
            return Status(Code.INVALID_ARGUMENT, sentence, barrier=(barrier.name, counter))
        return self._too_much(barrier.name)

    def counter_for(self, name: str, task_id: int) -> int:
        """Returns the counter of a task's next call, for profiles that send none."""
        if (opened := self.open.get(name)) is not None:
            return opened.counter
        finished = self.finished.get(name)
        if finished is None or finished.outcome is None:
            return 0
        return finished.counter + (finished.outcome.came >> task_id & 1)

    def forget(self) -> None:
        """Forgets all that is over."""
        for name in self.finished:
            self._changes.mark(BARRIER, name)
        self.finished.clear()

    def load(self, barriers: Iterable[Barrier]) -> None:
        """Loads what a journal holds."""
        for barrier in barriers:
            if barrier.done:
                self.finished[barrier.name] = barrier
            else:
                self.open[barrier.name] = barrier
                self._timers.add(barrier.deadline, barrier)


def _shown(name: str) -> str:
    if len(name) > _SHOWN_CHARACTERS:
        name = f"{name[:_SHOWN_CHARACTERS]}..."
    return repr(name)


def _arrived(barrier: Barrier) -> str:
    return f"{len(barrier.arrived)} of {len(barrier.participants)} at {_shown(barrier.name)}"


def _some(task_ids: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(task_ids)[:40]))
    what = "process" if len(task_ids) == 1 else "processes"
    more = f" and {len(task_ids) - 40} more" if len(task_ids) > 40 else ""
    return f"{what} {shown}{more}"


def _counter_mismatch(name: str, expected: int, found: int) -> Status:
    sentence = f"barrier {_shown(name)}: counter mismatch: expected {expected}, found {found}"
    return Status(Code.INTERNAL, sentence, barrier=(name, expected))


def _conflict(name: str, counter: int, why: str) -> Status:
    what = (
        "Conflicting tasks specified by different processes for the same barrier:"
        f" {name[:_SHOWN_CHARACTERS]}::{counter}."
    )
    return Status(Code.INVALID_ARGUMENT, f"{what} {why}", barrier=(name, counter))


def _not_among(arrival: Arrival, named: frozenset[int], counter: int) -> Status:
    what = (
        f"A non-participating task ({arrival.task_id}) called the barrier:"
        f" {arrival.name[:_SHOWN_CHARACTERS]}::{counter}"
    )
    sentence = f"{what}; it is one of {_some(named)}"
    return Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, counter))


def _unknown(arrival: Arrival, unknown: frozenset[int], num_tasks: int) -> Status:
    where = f"Barrier Id: {arrival.name[:_SHOWN_CHARACTERS]}::{arrival.counter}"
    what = (
        f"Unexpected task ({min(unknown)}) that is not in the cluster called the barrier. {where}"
    )
    sentence = f"{what}; the job has 0 to {num_tasks - 1}"
    return Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, arrival.counter))


def repeated(arrival: Arrival) -> Status:
    """Returns the error of a call that names a task twice."""
    return _conflict(
        arrival.name, arrival.counter, f"Process {arrival.task_id} named a participant twice"
    )

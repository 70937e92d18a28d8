"""A barrier of the living: each member of a set asks who of the set is alive, and all get one
answer. Pure.

The last answer of each set stays. A caller whose answer was lost sends its call again, and gets
that very answer: one that waited in its stead would be answered with the next question of the
others, and be one behind them from then on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..limits import Limits
from .status import ALIVE, Changes, Code, Completions, Missing, Status, beyond, name_processes
from .task_table import TaskTable
from .timers import Timers, Wait


class Living(NamedTuple):
    """A task that is alive, with its incarnations at the time of the answer: by when it is sent,
    the task may have left.
    """

    task_id: int
    life: int
    agent: int


class Sending(NamedTuple):
    """Tells a call that is sent again from the caller's next one: the version at which the caller's
    life began, and its number of the call.
    """

    life: int
    number: int


@dataclass(frozen=True, slots=True)
class LivenessAnswer:
    """The last answer to a set of members. `answered`: the call of each member that it answers."""

    serial: int
    members: frozenset[int]
    living: tuple[Living, ...]
    answered: dict[int, Sending]


@dataclass(slots=True)
class LivenessWait(Wait):
    """A call that asks who of `members` is alive."""

    members: frozenset[int] = frozenset()
    sending: Sending | None = None


@dataclass(slots=True)
class _Gathering:
    """The calls about one set, and how many of its connected members have yet to ask."""

    members: frozenset[int]
    waits: dict[int, LivenessWait] = field(default_factory=dict)
    absent: int = 0

    def count(self, task_table: TaskTable) -> None:
        """Counts the connected members that have yet to ask."""
        self.absent = sum(
            task_table.connected(task_id) for task_id in self.members if task_id not in self.waits
        )

    def enter(self, wait: LivenessWait, connected: bool) -> LivenessWait | None:
        """Takes a member's call; returns its former one, whose place this one takes."""
        former = self.waits.get(wait.task_id)
        if former is None:
            self.absent -= connected
        self.waits[wait.task_id] = wait
        return former

    def leave(self, task_id: int, connected: bool) -> None:
        """Forgets a member's call."""
        del self.waits[task_id]
        self.absent += connected


class LivenessBarrier:
    """Holds the waiting calls by set of members. Call `resolve` after each change of the task
    table.
    """

    def __init__(
        self,
        limits: Limits,
        task_table: TaskTable,
        timers: Timers,
        completions: Completions,
        *,
        changes: Changes,
    ) -> None:
        self._limits = limits
        self._task_table = task_table
        self._timers = timers
        self._completions = completions
        self._changes = changes
        self._gatherings: dict[frozenset[int], _Gathering] = {}
        self._by_call: dict[Any, LivenessWait] = {}
        self._seen: tuple[float, frozenset[int]] | None = None
        self._absent: list[int] = []
        self._missing: tuple[Missing, ...] = ()
        # the one given last is the last one
        self._answers: OrderedDict[frozenset[int], LivenessAnswer] = OrderedDict()
        self._serial = 0
        self._kept_members = 0
        self.answers: dict[int, LivenessAnswer] = {}  # the same by serial number

    def arrive(
        self,
        call: Any,
        task_id: int,
        members: frozenset[int],
        now: float,
        deadline: float = math.inf,
        *,
        sending: Sending | None = None,
    ) -> None:
        """Answers with the tasks that are alive, once every connected one among `members` has
        asked for the same set. A call without a `sending` is never sent again.
        """
        if task_id not in members:
            sentence = (
                f"Requesting task {task_id} is not one of the tasks specified in a GetAliveTasks"
                " request."
            )
            status = Status(Code.INVALID_ARGUMENT, sentence, from_service=False)
            self._completions.fail(call, status)
            return
        if members not in self._gatherings and members not in self._answers:
            members = self._known(members)
        last = self._answers.get(members)
        if last is not None and sending is not None and last.answered.get(task_id) == sending:
            self._completions.succeed(call, last.living)
            return
        gathering = self._gatherings.get(members)
        if gathering is None:
            gathering = self._gatherings[members] = _Gathering(members)
            gathering.count(self._task_table)
        wait = LivenessWait(call, task_id, now, self, members=members, sending=sending)
        former = gathering.enter(wait, self._task_table.connected(task_id))
        self._by_call[call] = wait
        if former is not None:
            former.end()
            del self._by_call[former.call]
            sentence = f"a newer call of process {task_id} took this one's place"
            self._completions.fail(former.call, Status(Code.CANCELLED, sentence))
        self._timers.add(deadline, wait)
        if not gathering.absent:
            self._answer(gathering)

    def _known(self, members: frozenset[int]) -> frozenset[int]:
        # The same object where it can be: a look-up by another one compares all members.
        if members <= self._task_table.everyone:
            return members
        return members & self._task_table.everyone

    def resolve(self) -> None:
        """Answers each set whose connected members have all asked."""
        for gathering in list(self._gatherings.values()):
            gathering.count(self._task_table)
            if not gathering.absent:
                self._answer(gathering)

    def _answer(self, gathering: _Gathering) -> None:
        del self._gatherings[gathering.members]
        tasks = [
            self._task_table.tasks[task_id]
            for task_id in sorted(gathering.members)
            if self._task_table.connected(task_id)
        ]
        living = tuple(
            Living(task.task_id, task.incarnation(session=True), task.incarnation(session=False))
            for task in tasks
        )
        waits = gathering.waits.values()
        for wait in waits:
            wait.end()
            del self._by_call[wait.call]
            self._completions.succeed(wait.call, living)
        answered = {wait.task_id: wait.sending for wait in waits if wait.sending is not None}
        if answered:
            self._keep(LivenessAnswer(self._serial + 1, gathering.members, living, answered))

    def _keep(self, answer: LivenessAnswer) -> None:
        self._serial = answer.serial
        former = self._answers.pop(answer.members, None)
        if former is not None:
            self._forget_answer(former)
        self._answers[answer.members] = answer
        self._kept_members += len(answer.members)
        self.answers[answer.serial] = answer
        self._changes.mark(ALIVE, answer.serial)
        while self._kept_members > self._limits.alive_members and len(self._answers) > 1:
            self._forget_answer(self._answers.popitem(last=False)[1])

    def _forget_answer(self, answer: LivenessAnswer) -> None:
        self._kept_members -= len(answer.members)
        del self.answers[answer.serial]
        self._changes.mark(ALIVE, answer.serial)

    def load(self, answers: Iterable[LivenessAnswer]) -> None:
        """Puts in the answers that a journal holds."""
        for answer in sorted(answers, key=lambda each: each.serial):
            self._keep(answer)

    def touch_all(self) -> None:
        """Has a journal that begins anew write all of them."""
        for serial in self.answers:
            self._changes.mark(ALIVE, serial)

    def time_out(self, wait: LivenessWait, now: float) -> None:
        """Ends a wait with the names of the members that have not asked."""
        members = wait.members
        self._look(members, now)
        count = len(self._absent)
        arrived = f"{len(members) - count} of {len(members)} asked who is alive"
        who = name_processes(self._missing, count)
        sentence = f"{arrived}, missing {who}; waited {now - wait.since:.1f} s"
        self._forget(wait)
        status = Status(
            Code.DEADLINE_EXCEEDED,
            sentence,
            missing=self._missing,
            absent=beyond(self._missing, self._absent),
        )
        self._completions.fail(wait.call, status)

    def _look(self, members: frozenset[int], now: float) -> None:
        """Looks who has not asked; calls whose time is over at one moment share one look."""
        if self._seen == (now, members):
            return
        self._seen = (now, members)
        waits = self._gatherings[members].waits
        connected = self._task_table.connected
        self._absent = [each for each in members if connected(each) and each not in waits]
        self._missing = self._task_table.missing(self._absent, now)

    def _forget(self, wait: LivenessWait) -> None:
        wait.end()
        del self._by_call[wait.call]
        gathering = self._gatherings[wait.members]
        gathering.leave(wait.task_id, self._task_table.connected(wait.task_id))
        if not gathering.waits:
            del self._gatherings[wait.members]

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        wait = self._by_call.get(call)
        if wait is not None:
            self._forget(wait)
        return wait is not None

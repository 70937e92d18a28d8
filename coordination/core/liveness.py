"""A barrier of the living: each member of a set asks who of the set is alive, and all get one
answer. Pure.

The last answer of each set stays. A caller whose answer was lost sends its call again, and gets
that very answer: one that waited in its stead would be answered with the next question of the
others, and be one behind them from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..limits import Limits
from .calls import Call, Timers
from .gathering import Gathering
from .status import ALIVE, Changes, Code, Status
from .task_table import TaskState, TaskTable


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


class LivenessBarrier:
    """Holds the waiting calls by set of members. Call `resolve` after each loss of a task."""

    def __init__(
        self, limits: Limits, task_table: TaskTable, timers: Timers, changes: Changes
    ) -> None:
        self._limits = limits
        self._task_table = task_table
        self._timers = timers
        self._changes = changes
        self._gatherings: dict[frozenset[int], Gathering] = {}
        # the one given last is the last one
        self._answers: OrderedDict[frozenset[int], LivenessAnswer] = OrderedDict()
        self._serial = 0
        self._kept_members = 0
        self.answers: dict[int, LivenessAnswer] = {}  # the same by serial number

    def arrive(self, call: Call, members: frozenset[int]) -> None:
        """Answers with the tasks that are alive, once every connected one among `members` has
        asked for the same set.
        """
        task_id = call.task_id
        if task_id not in members:
            sentence = (
                f"Requesting task {task_id} is not one of the tasks specified in a GetAliveTasks"
                " request."
            )
            call.fail(Status(Code.INVALID_ARGUMENT, sentence, from_service=False))
            return
        if members not in self._gatherings and members not in self._answers:
            # The same object where it can be: a look-up by another one compares all members.
            everyone = self._task_table.everyone
            members = members if members <= everyone else members & everyone
        last = self._answers.get(members)
        sending = Sending(call.life, call.number)
        if last is not None and call.number and last.answered.get(task_id) == sending:
            call.succeed(last.living)
            return
        gathering = self._gatherings.get(members)
        if gathering is None:
            gathering = self._gatherings[members] = Gathering(
                members,
                (TaskState.CONNECTED,),
                self._task_table,
                self._timers,
                late=lambda now, since: self._timed_out(members, now, since),
                emptied=lambda: self._gatherings.pop(members),
            )
        gathering.replace(call)
        if gathering.is_complete:
            self._answer(gathering)

    def resolve(self) -> None:
        """Answers each set whose connected members have all asked."""
        for gathering in list(self._gatherings.values()):
            if gathering.is_complete:
                self._answer(gathering)

    def _answer(self, gathering: Gathering) -> None:
        tasks = [self._task_table.tasks[task_id] for task_id in gathering.expected()]
        living = tuple(
            Living(task.task_id, task.incarnation(session=True), task.incarnation(session=False))
            for task in tasks
        )
        answered = {
            task_id: Sending(call.life, call.number)
            for task_id, call in gathering.items()
            if call.number
        }
        gathering.succeed(living)
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

    def _timed_out(self, members: frozenset[int], now: float, since: float) -> Status:
        """Returns the error of those whose time is over, with the members that have not asked."""
        absent = self._gatherings[members].absent()
        asked = f"{len(members) - len(absent)} of {len(members)} asked who is alive, missing"
        waited = f"; waited {now - since:.1f} s"
        return self._task_table.lacking(Code.DEADLINE_EXCEEDED, asked, absent, now, waited)

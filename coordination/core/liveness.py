"""A barrier of the living: each member of a set asks who of the set is alive, and all get one
answer. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .status import Code, Completion, Status, name_processes
from .task_table import TaskTable
from .timers import Timers, Wait


class Living(NamedTuple):
    """A task that is alive, with its incarnations at the time of the answer: by when it is sent,
    the task may have left.
    """

    task_id: int
    session: int
    agent: int


@dataclass(slots=True)
class LivenessWait(Wait):
    """A call that asks who of `members` is alive."""

    members: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Gathering:
    """The calls about one set, and how many of its connected members have yet to ask."""

    waits: dict[int, LivenessWait] = field(default_factory=dict)
    absent: int = 0


class LivenessBarrier:
    """Holds the waiting calls by set of members. Call `resolve` after each change of the task
    table.
    """

    def __init__(
        self, task_table: TaskTable, timers: Timers, completions: list[Completion]
    ) -> None:
        self._task_table = task_table
        self._timers = timers
        self._completions = completions
        self._gatherings: dict[frozenset[int], _Gathering] = {}

    def arrive(
        self,
        call: Any,
        task_id: int,
        task_ids: Sequence[int],
        now: float,
        deadline: float = math.inf,
    ) -> None:
        """Answers with the tasks that are alive, once every connected one among `task_ids` has
        asked for the same set.
        """
        if task_id not in task_ids:
            sentence = (
                f"Requesting task {task_id} is not one of the tasks specified in a GetAliveTasks"
                " request."
            )
            self._completions.append(
                Completion(call, None, Status(Code.INVALID_ARGUMENT, sentence, from_service=False))
            )
            return
        members = frozenset(task_ids) & self._task_table.everyone
        gathering = self._gatherings.get(members)
        if gathering is None:
            gathering = self._gatherings[members] = _Gathering()
            gathering.absent = self._absent(members, gathering)
        older = gathering.waits.get(task_id)
        if older is not None:
            older.done = True
            sentence = f"a newer call of process {task_id} took this one's place"
            self._completions.append(Completion(older.call, None, Status(Code.CANCELLED, sentence)))
        else:
            gathering.absent -= self._task_table.connected(task_id)
        gathering.waits[task_id] = LivenessWait(call, task_id, now, self, members=members)
        self._timers.add(deadline, gathering.waits[task_id])
        if not gathering.absent:
            self._answer(members, gathering)

    def _absent(self, members: frozenset[int], gathering: _Gathering) -> int:
        return sum(
            self._task_table.connected(task_id)
            for task_id in members
            if task_id not in gathering.waits
        )

    def resolve(self) -> None:
        """Answers each set whose connected members have all asked."""
        for members, gathering in list(self._gatherings.items()):
            gathering.absent = self._absent(members, gathering)
            if not gathering.absent:
                self._answer(members, gathering)

    def _answer(self, members: frozenset[int], gathering: _Gathering) -> None:
        del self._gatherings[members]
        tasks = [
            self._task_table.tasks[task_id]
            for task_id in sorted(members)
            if self._task_table.connected(task_id)
        ]
        living = [
            Living(task.task_id, task.incarnation(session=True), task.incarnation(session=False))
            for task in tasks
        ]
        for wait in gathering.waits.values():
            wait.done = True
            self._completions.append(Completion(wait.call, living, None))

    def time_out(self, wait: LivenessWait, now: float) -> None:
        """Ends a wait with the names of the members that have not asked."""
        members, waits = wait.members, self._gatherings[wait.members].waits
        missing = self._task_table.missing(
            [t for t in members if self._task_table.connected(t) and t not in waits], now
        )
        arrived = f"{len(members) - len(missing)} of {len(members)} asked who is alive"
        sentence = f"{arrived}, missing {name_processes(missing)}; waited {now - wait.since:.1f} s"
        self._forget(wait)
        self._completions.append(
            Completion(wait.call, None, Status(Code.DEADLINE_EXCEEDED, sentence, missing=missing))
        )

    def _forget(self, wait: LivenessWait) -> None:
        wait.done = True
        gathering = self._gatherings[wait.members]
        del gathering.waits[wait.task_id]
        gathering.absent += self._task_table.connected(wait.task_id)
        if not gathering.waits:
            del self._gatherings[wait.members]

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        waits = (
            wait for gathering in self._gatherings.values() for wait in gathering.waits.values()
        )
        wait = next((each for each in waits if each.call is call), None)
        if wait is not None:
            self._forget(wait)
        return wait is not None

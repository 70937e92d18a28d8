"""A barrier of the living: each member of a set asks who of the set is alive, and all get one
answer. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .status import Code, Completions, Status, name_processes
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

    def __init__(self, task_table: TaskTable, timers: Timers, completions: Completions) -> None:
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
            status = Status(Code.INVALID_ARGUMENT, sentence, from_service=False)
            self._completions.fail(call, status)
            return
        members = frozenset(task_ids) & self._task_table.everyone
        gathering = self._gatherings.get(members)
        if gathering is None:
            gathering = self._gatherings[members] = _Gathering(members)
            gathering.count(self._task_table)
        wait = LivenessWait(call, task_id, now, self, members=members)
        former = gathering.enter(wait, self._task_table.connected(task_id))
        if former is not None:
            former.end()
            sentence = f"a newer call of process {task_id} took this one's place"
            self._completions.fail(former.call, Status(Code.CANCELLED, sentence))
        self._timers.add(deadline, wait)
        if not gathering.absent:
            self._answer(gathering)

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
        living = [
            Living(task.task_id, task.incarnation(session=True), task.incarnation(session=False))
            for task in tasks
        ]
        for wait in gathering.waits.values():
            wait.end()
            self._completions.succeed(wait.call, living)

    def time_out(self, wait: LivenessWait, now: float) -> None:
        """Ends a wait with the names of the members that have not asked."""
        members = wait.members
        waits = self._gatherings[members].waits
        connected = self._task_table.connected
        absent = [task_id for task_id in members if connected(task_id) and task_id not in waits]
        missing = self._task_table.missing(absent, now)
        arrived = f"{len(members) - len(missing)} of {len(members)} asked who is alive"
        sentence = f"{arrived}, missing {name_processes(missing)}; waited {now - wait.since:.1f} s"
        self._forget(wait)
        status = Status(Code.DEADLINE_EXCEEDED, sentence, missing=missing)
        self._completions.fail(wait.call, status)

    def _forget(self, wait: LivenessWait) -> None:
        wait.end()
        gathering = self._gatherings[wait.members]
        gathering.leave(wait.task_id, self._task_table.connected(wait.task_id))
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

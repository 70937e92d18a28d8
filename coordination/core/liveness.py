"""A barrier of the living: each member of a set asks who of the set is alive, and all get one answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .status import Code, Completion, Status, name_processes
from .task_table import TaskTable
from .timers import Timers, Wait


@dataclass(slots=True)
class LivenessWait(Wait):
    """A call that asks who of `members` is alive."""

    members: frozenset[int] = frozenset()


class LivenessBarrier:
    """Holds the waiting calls by set of members. Call `resolve` after each change of the task table."""

    def __init__(self, task_table: TaskTable, timers: Timers, completions: list[Completion]) -> None:
        self._task_table, self._timers, self._completions = task_table, timers, completions
        self._waits: dict[frozenset[int], dict[int, LivenessWait]] = {}

    def arrive(self, call: Any, task_id: int, task_ids: Sequence[int], now: float, deadline: float = math.inf) -> None:
        """Answers with the tasks that are alive, once every connected one among `task_ids` has asked for the same set."""
        if task_id not in task_ids:
            sentence = f"process {task_id} asked who is alive in a set that it is not in"
            self._completions.append(Completion(call, None, Status(Code.INVALID_ARGUMENT, sentence, from_service=False)))
            return
        members = frozenset(task_ids) & self._task_table.everyone
        waits = self._waits.setdefault(members, {})
        older = waits.get(task_id)
        if older is not None:
            older.done = True
            sentence = f"a newer call of process {task_id} took this one's place"
            self._completions.append(Completion(older.call, None, Status(Code.CANCELLED, sentence)))
        waits[task_id] = LivenessWait(call, task_id, now, self, members=members)
        self._timers.add(deadline, waits[task_id])
        self.resolve()

    def resolve(self) -> None:
        """Answers each set whose connected members have all asked."""
        for members, waits in list(self._waits.items()):
            connected = [task_id for task_id in sorted(members) if self._task_table.connected(task_id)]
            if all(task_id in waits for task_id in connected):
                del self._waits[members]
                for wait in waits.values():
                    wait.done = True
                    self._completions.append(Completion(wait.call, connected, None))

    def time_out(self, wait: LivenessWait, now: float) -> None:
        """Ends a wait with the names of the members that have not asked."""
        members, waits = wait.members, self._waits[wait.members]
        missing = self._task_table.missing([t for t in members if self._task_table.connected(t) and t not in waits], now)
        arrived = f"{len(members) - len(missing)} of {len(members)} asked who is alive"
        sentence = f"{arrived}, missing {name_processes(missing)}; waited {now - wait.since:.1f} s"
        self._forget(wait)
        self._completions.append(Completion(wait.call, None, Status(Code.DEADLINE_EXCEEDED, sentence, missing=missing)))

    def _forget(self, wait: LivenessWait) -> None:
        wait.done = True
        waits = self._waits[wait.members]
        del waits[wait.task_id]
        if not waits:
            del self._waits[wait.members]

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        wait = next((each for waits in self._waits.values() for each in waits.values() if each.call is call), None)
        if wait is not None:
            self._forget(wait)
        return wait is not None

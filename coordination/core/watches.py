"""Calls that wait to see something of the tasks: a newer version of them all, or which of a set are alive. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .status import Code, Completion, Status, name_processes
from .task_table import TaskTable
from .timers import Timers


@dataclass(slots=True)
class Asking:
    """A call that asks who of a set is alive."""

    call: Any
    task_id: int
    wanted: frozenset[int]
    since: float
    looks: Looks
    done: bool = False

    def expire(self, now: float) -> None:
        """Ends the wait: its time is over."""
        self.looks.time_out(self, now)


class Looks:
    """Holds those who look. `look` answers whoever can be answered; call it after each change of the roster."""

    def __init__(self, roster: TaskTable, timers: Timers, replies: list[Completion]) -> None:
        self._roster, self._timers, self._replies = roster, timers, replies
        self._watches: dict[Any, int] = {}
        self._alive: dict[frozenset[int], dict[int, Asking]] = {}

    def watch(self, call: Any, version: int) -> None:
        """Answers as soon as the tasks are newer than `version`."""
        if version > self._roster.version:
            sentence = f"version {version} of the tasks is not yet; the latest is {self._roster.version}"
            self._replies.append(Completion(call, None, Status(Code.INVALID_ARGUMENT, sentence)))
        elif version < self._roster.version:
            self._replies.append(Completion(call, self._roster.version, None))
        else:
            self._watches[call] = version

    def alive(self, call: Any, task_id: int, task_ids: Sequence[int], now: float, deadline: float = math.inf) -> None:
        """Answers with the tasks that are alive, once every connected one among `task_ids` has asked for the same set."""
        if task_id not in task_ids:
            sentence = f"process {task_id} asked who is alive in a set that it is not in"
            self._replies.append(Completion(call, None, Status(Code.INVALID_ARGUMENT, sentence, from_service=False)))
            return
        wanted = frozenset(task_ids) & self._roster.everyone
        asking = self._alive.setdefault(wanted, {})
        older = asking.get(task_id)
        if older is not None:
            older.done = True
            sentence = f"a newer call of process {task_id} took this one's place"
            self._replies.append(Completion(older.call, None, Status(Code.CANCELLED, sentence)))
        asking[task_id] = Asking(call, task_id, wanted, now, self)
        self._timers.add(deadline, asking[task_id])
        self.look()

    def look(self) -> None:
        """Answers all who can be answered."""
        for wanted, asking in list(self._alive.items()):
            connected = [task_id for task_id in sorted(wanted) if self._roster.connected(task_id)]
            if all(task_id in asking for task_id in connected):
                del self._alive[wanted]
                for each in asking.values():
                    each.done = True
                    self._replies.append(Completion(each.call, connected, None))
        for call in [call for call, version in self._watches.items() if self._roster.version > version]:
            del self._watches[call]
            self._replies.append(Completion(call, self._roster.version, None))

    def time_out(self, asking: Asking, now: float) -> None:
        """Ends a wait with the names of those who have not asked."""
        others = self._alive[asking.wanted]
        missing = self._roster.missing([t for t in asking.wanted if self._roster.connected(t) and t not in others], now)
        came = f"{len(asking.wanted) - len(missing)} of {len(asking.wanted)} asked who is alive"
        sentence = f"{came}, missing {name_processes(missing)}; waited {now - asking.since:.1f} s"
        self._forget(asking)
        self._replies.append(Completion(asking.call, None, Status(Code.DEADLINE_EXCEEDED, sentence, missing=missing)))

    def _forget(self, asking: Asking) -> None:
        asking.done = True
        others = self._alive[asking.wanted]
        del others[asking.task_id]
        if not others:
            del self._alive[asking.wanted]

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone; says whether it waited here."""
        if self._watches.pop(call, None) is not None:
            return True
        found = next((each for asking in self._alive.values() for each in asking.values() if each.call is call), None)
        if found is not None:
            self._forget(found)
        return found is not None

"""Calls of tasks that wait for each other, and how tasks leave together by them: the shutdown
barrier, of all tasks that have not left alone. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .calls import Call, Line, Timers
from .status import Code, Status
from .task_table import TaskState, TaskTable
from .watches import Polls

_MAY_LEAVE = frozenset(TaskState) - {TaskState.DISCONNECTED}


class Gathering(Line):
    """The calls of some tasks, one of each: they wait until all `members` whose state is one of
    those `awaited` have called.
    """

    def __init__(
        self,
        members: frozenset[int],
        awaited: Collection[TaskState],
        task_table: TaskTable,
        timers: Timers,
        *,
        late: Callable[[float, float], Status] | None = None,
        emptied: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(timers, late, emptied)
        self.members = members
        self._awaited = awaited
        self._task_table = task_table
        self._moves = -1
        self._count = 0

    def expected(self) -> list[int]:
        """Returns the members that are waited for, or were, in order."""
        tasks = self._task_table.tasks
        return sorted(each for each in self.members if tasks[each].state in self._awaited)

    def absent(self) -> list[int]:
        """Returns the members that are waited for."""
        return [task_id for task_id in self.expected() if task_id not in self]

    @property
    def is_complete(self) -> bool:
        """Whether nobody is waited for."""
        if self._moves != self._task_table.moves:
            self._moves = self._task_table.moves
            self._count = len(self.expected())
        # A count answers all but the last: a look at all tasks for each of a thousand calls is a
        # million looks.
        return len(self) >= self._count and not self.absent()


class ShutdownBarrier(Gathering):
    """Holds the tasks that wait to leave."""

    def __init__(self, task_table: TaskTable, timers: Timers, polls: Polls) -> None:
        super().__init__(task_table.everyone, _MAY_LEAVE, task_table, timers)
        self._polls = polls

    def arrive(self, call: Call) -> None:
        """Lets a task arrive."""
        self.replace(call)
        self.resolve(call.came)

    def resolve(self, now: float) -> None:
        """Lets all go together, once all that have not left alone have arrived; fails where one of
        them is in error.
        """
        table = self._task_table
        if self and table.counts[TaskState.ERROR]:
            dead = [task.task_id for task in table.tasks if task.state is TaskState.ERROR]
            self._fail_for(dead, Code.INTERNAL, now)
        elif self and self.is_complete:
            leaving = [table.tasks[task_id] for task_id in self]
            self.succeed()
            for task in leaving:
                table.leave(task, now)

    def time_out(self, due: Sequence[Call], now: float) -> None:
        """Fails all with the names of those that have not arrived."""
        self._fail_for(self.absent(), Code.DEADLINE_EXCEEDED, now)

    def _fail_for(self, absent: Collection[int], code: Code, now: float) -> None:
        arrived = f"{len(self)} of {len(self._task_table)} had come"
        what = f"Shutdown barrier has failed: {arrived}, missing"
        status = self._task_table.lacking(code, what, absent, now)
        self.fail(status)
        self._polls.propagate(status)

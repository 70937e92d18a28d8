"""How tasks leave together: the shutdown barrier, of all tasks that have not left alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .status import Code, Completions, Status, beyond, name_processes
from .task_table import Task, TaskState, TaskTable
from .timers import Timers, Wait


class ShutdownBarrier:
    """Holds the tasks that wait to leave. `leave` lets a task go, `propagate` makes an error
    everyone's.
    """

    def __init__(
        self,
        task_table: TaskTable,
        timers: Timers,
        completions: Completions,
        *,
        leave: Callable[[Task, float], None],
        propagate: Callable[[Status], None],
    ) -> None:
        self._task_table = task_table
        self._timers = timers
        self._completions = completions
        self._leave = leave
        self._propagate = propagate
        self._waits: dict[int, Wait] = {}

    def arrive(self, call: Any, task_id: int, now: float, timeout_s: float) -> None:
        """Lets a task arrive at the shutdown barrier."""
        older = self._waits.pop(task_id, None)
        if older is not None:
            older.end()
            sentence = f"a newer call of process {task_id} took this one's place"
            self._completions.fail(older.call, Status(Code.CANCELLED, sentence))
        wait = self._waits[task_id] = Wait(call, task_id, now, self)
        self._timers.add(now + timeout_s, wait)
        self.resolve(now)

    def resolve(self, now: float) -> None:
        """Lets all go together, once all that have not left alone have arrived; fails where one of
        them is in error.
        """
        if not self._waits:
            return
        counts = self._task_table.counts
        gone = len(self._waits) + counts[TaskState.DISCONNECTED]
        # Counts answer all arrivals but the last: a look at all tasks for each of a thousand
        # arrivals is a million looks.
        if gone < len(self._task_table) and not counts[TaskState.ERROR]:
            return
        dead = [task.task_id for task in self._task_table.tasks if task.state is TaskState.ERROR]
        if dead:
            self._fail(dead, Code.INTERNAL, now)
        elif not self._absent():
            waits = self._take()
            for wait in waits:
                self._completions.succeed(wait.call)
            for wait in waits:
                self._leave(self._task_table.tasks[wait.task_id], now)

    def _absent(self) -> list[int]:
        tasks = (
            task for task in self._task_table.tasks if task.state is not TaskState.DISCONNECTED
        )
        return [task.task_id for task in tasks if task.task_id not in self._waits]

    def _take(self) -> list[Wait]:
        waits = list(self._waits.values())
        self._waits = {}
        for wait in waits:
            wait.end()
        return waits

    def time_out(self, wait: Wait, now: float) -> None:
        """Fails the barrier with the names of those that have not arrived."""
        self._fail(self._absent(), Code.DEADLINE_EXCEEDED, now)

    def _fail(self, absent: Sequence[int], code: Code, now: float) -> None:
        missing = self._task_table.missing(absent, now)
        arrived = f"{len(self._waits)} of {len(self._task_table)} had come"
        status = Status(
            code,
            f"Shutdown barrier has failed: {arrived}, missing"
            f" {name_processes(missing, len(absent))}",
            missing=missing,
            absent=beyond(missing, absent),
        )
        self._completions.fail_all([wait.call for wait in self._take()], status)
        self._propagate(status)

    def waiting(self) -> dict[int, float]:
        """Returns the waiting tasks, and since when they wait."""
        return {task_id: wait.since for task_id, wait in self._waits.items()}

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        for task_id, wait in self._waits.items():
            if wait.call is call:
                wait.end()
                del self._waits[task_id]
                return True
        return False

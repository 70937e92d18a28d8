"""How tasks come: agents register, Sessions open, and all are answered once the job is complete.
Pure.

A task that comes while a former life of it is still connected ends that life first, where the job
is recoverable; else it is refused, and the error is everyone's. A Session that opens beside an
agent, or an agent that registers beside a Session, is of the same life.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..limits import Config
from .status import Code, Completions, Missing, Status, beyond, name_processes
from .task_table import Task, TaskState, TaskTable
from .timers import Timers, Wait


class Registration:
    """Holds the calls that wait for the job to be complete; `gathered` says whether all tasks have
    been connected at one time.

    `lose` ends a life, `propagate` makes an error everyone's, `connected` is called when tasks have
    been connected, `replace` when a process registers another agent beside its Session.
    """

    def __init__(
        self,
        config: Config,
        task_table: TaskTable,
        timers: Timers,
        completions: Completions,
        *,
        lose: Callable[[Task, TaskState, float], None],
        propagate: Callable[[Status], None],
        connected: Callable[[], None],
        replace: Callable[[int, int], None],
    ) -> None:
        self._config = config
        self._task_table = task_table
        self._timers = timers
        self._completions = completions
        self._lose = lose
        self._propagate = propagate
        self._connected = connected
        self._replace = replace
        self.gathered = False
        self._over: Status | None = None  # why nobody is taken in any more
        self._registering: dict[int, Wait] = {}
        self._gathering: dict[Any, Wait] = {}
        self._seen: tuple[float, int, int] | None = None
        self._absent: list[int] = []
        self._missing: tuple[Missing, ...] = ()

    def load(self, gathered: bool) -> None:
        """Puts in what a journal holds."""
        self.gathered = gathered

    # --- Agents

    def register(
        self, call: Any, task_id: int, incarnation: int, now: float, deadline: float = math.inf
    ) -> None:
        """Registers an agent; answers when every task of the job has come."""
        task = self._task_table.get(task_id)
        if task is None:
            count = len(self._task_table)
            sentence = (
                f"Unexpected task registered with task={task_id}: the job has {count}, 0 to"
                f" {count - 1}"
            )
            self._completions.fail(call, Status(Code.INVALID_ARGUMENT, sentence))
            return
        # Profile A's calls name no process: an incarnation that two processes shared would let one
        # speak for the other.
        if self._task_table.by_agent.get(incarnation, task_id) != task_id:
            sentence = (
                f"process {task_id} came with the incarnation of another; expected a random number"
            )
            self._completions.fail(call, Status(Code.INVALID_ARGUMENT, sentence))
            return
        if incarnation in task.former:
            self._completions.fail(call, self._task_table.fenced(task))
            return
        if self._over is not None:
            self._completions.fail(call, self._over)
            return
        self._void_older(task_id, incarnation)
        refusal = self._may_register(task, incarnation)
        if refusal is not None:
            self._completions.fail(call, refusal)
            self._propagate(refusal)
            return
        if not task.session:
            task.heard(now)
        wait = Wait(call, task_id, now, self, incarnation=incarnation)
        self._registering[task_id] = wait
        self._timers.add(deadline, wait)
        self._gather(now)

    def _void_older(self, task_id: int, incarnation: int) -> None:
        """Ends the registration whose place a newer one of the same task takes."""
        older = self._registering.pop(task_id, None)
        if older is not None:
            older.end()
            code = Code.CANCELLED if older.incarnation == incarnation else Code.ALREADY_EXISTS
            sentence = f"process {task_id} has registered anew; this registration is void"
            self._completions.fail(older.call, Status(code, sentence))

    def _may_register(self, task: Task, incarnation: int) -> Status | None:
        may_come = (TaskState.UNINITIALIZED, TaskState.DISCONNECTED)
        if self._config.recoverable or task.state in may_come:
            return None
        if task.state is TaskState.CONNECTED and task.agent in (0, incarnation):
            return None
        if task.state is TaskState.ERROR:
            assert task.error is not None
            sentence = (
                f"process {task.task_id} cannot come back, the job is not recoverable:"
                f" {task.error.message}"
            )
        else:
            what = (
                f"{task.task_id} unexpectedly tried to connect with a different incarnation. It has"
                " likely restarted."
            )
            sentence = f"{what} The job is not recoverable"
        return Status(Code.ABORTED, sentence, source_task=task.task_id)

    # --- Sessions

    def open_session(
        self, task_id: int, incarnation: int, host: str, pid: int, now: float
    ) -> Status | None:
        """Lets a process come over a Session, or come back with the same incarnation."""
        task = self._task_table.get(task_id)
        if task is None:
            return self._task_table.no_such_task(task_id)
        if len(host.encode()) > self._config.limits.host_bytes:
            sentence = (
                f"a host name of {len(host.encode())} bytes; expected at most"
                f" {self._config.limits.host_bytes}"
            )
            return Status(Code.RESOURCE_EXHAUSTED, sentence)
        if incarnation == 0:
            return Status(Code.INVALID_ARGUMENT, "an incarnation of 0; expected a random number")
        if incarnation in task.former:
            return self._task_table.fenced(task)
        is_same_life = task.session == incarnation and task.state is TaskState.CONNECTED
        is_known = is_same_life and task.host == host and task.pid == pid
        if not is_same_life:
            status = self._may_come_back(task, incarnation)
            if status is not None:
                return status
            self._begin_life(task, now)
        self._task_table.set_session(task, incarnation)
        task.attach(host, pid, now)
        # Thousands connect again where the coordinator was started again. A change of each, told
        # to all, would keep it too busy to let them in.
        if not is_known:
            self._task_table.touch(task)
        self._gather(now)
        return None

    def _may_come_back(self, task: Task, incarnation: int) -> Status | None:
        fresh = task.state is not TaskState.ERROR and task.session in (0, incarnation)
        if (
            fresh
            or self._config.recoverable
            or not self.gathered
            or task.state is TaskState.DISCONNECTED
        ):
            return None
        cause = task.error.message if task.error else "it has been restarted"
        sentence = f"process {task.task_id} cannot come back, the job is not recoverable: {cause}"
        status = Status(Code.ABORTED, sentence, source_task=task.task_id)
        if task.error is None:
            self._propagate(status)
        return status

    def _begin_life(self, task: Task, now: float) -> None:
        """Connects a task. A former Session's life ends first; an agent alone is of the process
        whose Session opens beside it.
        """
        if task.state is TaskState.CONNECTED and task.session:
            task.end_life()
            self._lose(task, TaskState.DISCONNECTED, now)
            self._task_table.set_agent(task, 0)
        elif task.state is not TaskState.CONNECTED:
            self._task_table.set_agent(task, 0)
        self._task_table.move(task, TaskState.CONNECTED, now)

    # --- All of them

    def held(self, task_id: int) -> bool:
        """Returns whether a task is connected or waits to be."""
        return self._task_table.connected(task_id) or task_id in self._registering

    def wait_for_all(self, call: Any, task_id: int, now: float, deadline: float) -> None:
        """Answers a Session when every task of the job has come."""
        if self._over is not None:
            self._completions.fail(call, self._over)
            return
        wait = self._gathering[call] = Wait(call, task_id, now, self)
        self._timers.add(deadline, wait)
        self._gather(now)

    def end_attempt(self, why: Status) -> None:
        """Fails those that wait for all, now and later: there is another attempt to join."""
        self._over = why
        for wait in [*self._gathering.values(), *self._registering.values()]:
            self._end(wait)
            self._completions.fail(wait.call, why)

    def _gather(self, now: float) -> None:
        """Connects the agents that register, once all tasks have come."""
        if not self.gathered:
            if self._task_table.connected_count + len(self._registering) < len(self._task_table):
                return  # counts answer nearly all who come, without a look at all who wait
            here = self._task_table.connected_count + sum(
                not self._task_table.connected(task_id) for task_id in self._registering
            )
            if here < len(self._task_table):
                return
            self.gathered = True
            # A process that waited for the others sent no heartbeat: its time begins now.
            for task in self._task_table.tasks:
                if task.attached:
                    task.heard(now)
        for wait in self._registering.values():
            wait.end()
            # before the answer: an agent sends its first heartbeat after it
            self._connect_agent(self._task_table.tasks[wait.task_id], wait.incarnation, now)
            self._completions.succeed(wait.call, self._config.incarnation)
        for call, wait in self._gathering.items():
            wait.end()
            self._completions.succeed(call, self._config.incarnation)
        self._registering = {}
        self._gathering = {}
        self._connected()

    def _connect_agent(self, task: Task, incarnation: int, now: float) -> None:
        if not task.session or task.state is not TaskState.CONNECTED:
            task.heard(now)
        if task.state is TaskState.CONNECTED and task.agent == incarnation:
            return
        if task.state is TaskState.CONNECTED and task.agent and not task.session:
            task.end_life()
            self._lose(task, TaskState.DISCONNECTED, now)
        elif task.agent:
            self._replace(task.task_id, task.agent_since)
        if task.state is TaskState.CONNECTED:
            self._task_table.set_agent(task, incarnation)
            self._task_table.touch(task)
        else:
            self._task_table.set_session(task, 0)
            self._task_table.set_agent(task, incarnation)
            self._task_table.move(task, TaskState.CONNECTED, now)

    def time_out(self, wait: Wait, now: float) -> None:
        """Ends a wait with the names of those that have not come."""
        self._look(now)
        total = len(self._task_table)
        count = len(self._absent)
        self._end(wait)
        sentence = (
            f"{total - count} of {total} registered, missing"
            f" {name_processes(self._missing, count)}; waited {now - wait.since:.1f} s"
        )
        status = Status(
            Code.DEADLINE_EXCEEDED,
            sentence,
            missing=self._missing,
            absent=beyond(self._missing, self._absent),
        )
        self._completions.fail(wait.call, status)

    def _look(self, now: float) -> None:
        """Looks who has not come; a thousand waits that end at one moment share one look."""
        seen = (now, self._task_table.version, len(self._registering))
        if self._seen == seen:
            return
        self._seen = seen
        everyone = self._task_table.everyone
        self._absent = [task_id for task_id in everyone if not self.held(task_id)]
        self._missing = self._task_table.missing(self._absent, now)

    def waiting(self) -> list[int]:
        """Returns the task of each call that waits."""
        return [*self._registering, *(wait.task_id for wait in self._gathering.values())]

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        wait = self._gathering.get(call) or next(
            (each for each in self._registering.values() if each.call is call), None
        )
        if wait is not None:
            self._end(wait)
        return wait is not None

    def _end(self, wait: Wait) -> None:
        wait.end()
        self._gathering.pop(wait.call, None)
        if self._registering.get(wait.task_id) is wait:
            del self._registering[wait.task_id]

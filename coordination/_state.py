"""The coordination service as one pure machine: (event, now) -> effects, with no socket, thread, lock or clock.

An event is a method; its effects are replies, appended to `replies`, each to a `call`: any hashable that stands for a caller who waits.
Every transport, the tests and the simulator drive this machine. A task's two channels and their lives are told in `_tasks`, barriers in
`_barriers`. Rules that span them are here:

- A task that is lost (silent too long, shut down, or in error) fails at once every barrier that it takes part in.
- Unless the job is recoverable, the first error is everyone's: it reaches every poll, and stays.
- An incarnation of the service is a secret of those who have registered: no refusal holds it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._barriers import Arrival, Barriers
from ._config import Config
from ._devices import Devices
from ._keys import Keys
from ._looks import Looks
from ._outcome import Code, Refusal, Reply, name_processes
from ._tasks import Roster, Task, TaskState
from ._timers import Timers


@dataclass(slots=True)
class Wait:
    """A call that waits for the others to come, to fail, or to go."""

    call: Any
    task_id: int
    machine: Machine
    since: float
    incarnation: int = 0
    leaving: bool = False
    done: bool = False

    def expire(self, now: float) -> None:
        """Ends the wait: its time is over."""
        self.machine.time_out(self, now)


class Machine:
    """Decides what each call ends with. Not safe for several threads; `now` is in seconds and never goes back."""

    def __init__(self, config: Config, now: float) -> None:
        self.config = config
        self.started = now
        self.replies: list[Reply] = []
        self.timers = Timers()
        self.roster = Roster(config.num_tasks)
        self.keys = Keys(config.limits, self.timers, self.replies)
        self.barriers = Barriers(config.limits, self.roster, self.timers, self.replies, config.recoverable)
        self.looks = Looks(self.roster, self.timers, self.replies)
        self.devices = Devices(config.num_tasks, self.replies)
        self.gathered = False  # whether all tasks have been there at one time
        self.error: Refusal | None = None  # the first one that is everyone's
        self._registering: dict[int, Wait] = {}
        self._gathering: dict[Any, Wait] = {}
        self._leaving: dict[int, Wait] = {}
        self._polls: dict[int, Wait] = {}
        self._next_scan = now + 1.0

    # ---- Who calls -----------------------------------------------------------------------------------------------------------------

    def check(self, task_id: int | None, task_incarnation: int, service_incarnation: int, now: float) -> int | Refusal:
        """Returns which task an agent's call comes from; refuses one for another service, or from a former life of its task.

        jaxlib's agents leave `Incarnations.task_id` empty: calls that name no source task are told apart by the task's incarnation.
        """
        if service_incarnation != self.config.incarnation:
            sentence = (
                "the call names another life of the coordination service: it was restarted without its journal, or never registered with"
            )
            return Refusal(Code.INTERNAL, sentence, mismatch=service_incarnation)
        known = self.roster.by_agent.get(task_incarnation)
        if known is None or task_id not in (None, known):
            if task_id is not None and self.roster.get(task_id) is None:
                return self._no_task(task_id)
            who = "a process" if task_id is None else f"process {task_id}"
            return Refusal(Code.ABORTED, f"{who} has shut down or been restarted; this call is from a former life of it")
        task = self.roster.tasks[known]
        if not task.session and task.state is TaskState.CONNECTED:
            task.last_seen = now
        return known

    def _no_task(self, task_id: int) -> Refusal:
        sentence = f"there is no process {task_id}: the job has {len(self.roster)}, 0 to {len(self.roster) - 1}"
        return Refusal(Code.INVALID_ARGUMENT, sentence)

    def _reply(self, call: Any, value: Any = None, refusal: Refusal | None = None) -> None:
        self.replies.append(Reply(call, value, refusal))

    def seen(self, task_id: int, now: float) -> None:
        """Notes a sign of life on a Session."""
        self.roster.tasks[task_id].last_seen = now

    # ---- Coming --------------------------------------------------------------------------------------------------------------------

    def register(self, call: Any, task_id: int, incarnation: int, now: float, deadline: float = math.inf) -> None:
        """Registers an agent; answers when every task of the job has come."""
        task = self.roster.get(task_id)
        if task is None:
            self._reply(call, refusal=self._no_task(task_id))
            return
        older = self._registering.pop(task_id, None)
        if older is not None:
            older.done = True
            code = Code.ALREADY_EXISTS if older.incarnation != incarnation else Code.CANCELLED
            self._reply(older.call, refusal=Refusal(code, f"process {task_id} has registered anew; this registration is void"))
        refusal = self._may_register(task, incarnation)
        if refusal is not None:
            self._reply(call, refusal=refusal)
            self._propagate(refusal)
            return
        if not task.session:
            task.last_seen = now
        wait = self._registering[task_id] = Wait(call, task_id, self, now, incarnation=incarnation)
        self.timers.add(deadline, wait)
        self._gather(now)

    def _may_register(self, task: Task, incarnation: int) -> Refusal | None:
        if self.config.recoverable or task.state in (TaskState.UNINITIALIZED, TaskState.DISCONNECTED):
            return None
        if task.state is TaskState.CONNECTED and task.agent in (0, incarnation):
            return None
        if task.state is TaskState.ERROR:
            assert task.error is not None
            sentence = f"process {task.task_id} cannot come back, the job is not recoverable: {task.error.message}"
        else:
            sentence = f"process {task.task_id} has been restarted, and the job is not recoverable"
        return Refusal(Code.ABORTED, sentence, source_task=task.task_id)

    def open_session(self, task_id: int, incarnation: int, host: str, pid: int, now: float) -> Refusal | None:
        """Lets a process come over a Session, or come back with the same incarnation."""
        task = self.roster.get(task_id)
        if task is None:
            return self._no_task(task_id)
        if len(host.encode()) > self.config.limits.host_bytes:
            return Refusal(
                Code.RESOURCE_EXHAUSTED, f"a host name of {len(host.encode())} bytes; expected at most {self.config.limits.host_bytes}"
            )
        if incarnation == 0:
            return Refusal(Code.INVALID_ARGUMENT, "an incarnation of 0; expected a random number")
        if task.session != incarnation or task.state is not TaskState.CONNECTED:
            refusal = self._may_come_back(task, incarnation)
            if refusal is not None:
                return refusal
            self._begin_life(task, now)
        task.session, task.host, task.pid, task.last_seen = incarnation, host, pid, now
        self.roster.touch(task)
        self._gather(now)
        return None

    def _may_come_back(self, task: Task, incarnation: int) -> Refusal | None:
        fresh = task.state is not TaskState.ERROR and task.session in (0, incarnation)
        if fresh or self.config.recoverable or not self.gathered or task.state is TaskState.DISCONNECTED:
            return None
        cause = task.error.message if task.error else "it has been restarted"
        refusal = Refusal(
            Code.ABORTED, f"process {task.task_id} cannot come back, the job is not recoverable: {cause}", source_task=task.task_id
        )
        if task.error is None:
            self._propagate(refusal)
        return refusal

    def _begin_life(self, task: Task, now: float) -> None:
        """Connects a task; whatever waits for its former life fails."""
        if task.state is TaskState.CONNECTED and (task.session or task.agent) and not self._same_process(task):
            self._lose(task, TaskState.DISCONNECTED, now)
            self.roster.set_agent(task, 0)
        elif task.state is not TaskState.CONNECTED:
            self.roster.set_agent(task, 0)
        self.roster.move(task, TaskState.CONNECTED, now)

    @staticmethod
    def _same_process(task: Task) -> bool:
        """An agent alone: the Session that opens beside it is its own process's."""
        return task.session == 0

    def held(self, task_id: int) -> bool:
        """Says whether a task is connected or waits to be."""
        return self.roster.connected(task_id) or task_id in self._registering

    def wait_for_all(self, call: Any, task_id: int, now: float, deadline: float) -> None:
        """Answers a Session when every task of the job has come."""
        wait = self._gathering[call] = Wait(call, task_id, self, now)
        self.timers.add(deadline, wait)
        self._gather(now)

    def _gather(self, now: float) -> None:
        """Connects those who register, once all tasks have come."""
        if not self.gathered:
            here = self.roster.connected_count + sum(not self.roster.connected(task_id) for task_id in self._registering)
            if here < len(self.roster):
                return
            self.gathered = True
        for wait in self._registering.values():
            wait.done = True
            self._connect_agent(self.roster.tasks[wait.task_id], wait.incarnation, now)
            self._reply(wait.call, self.config.incarnation)
        for call, wait in self._gathering.items():
            wait.done = True
            self._reply(call, self.config.incarnation)
        self._registering, self._gathering = {}, {}
        self.looks.look()

    def _connect_agent(self, task: Task, incarnation: int, now: float) -> None:
        if task.state is TaskState.CONNECTED and task.agent == incarnation:
            return
        if task.state is TaskState.CONNECTED and task.agent and not task.session:
            self._lose(task, TaskState.DISCONNECTED, now)
        self.roster.set_agent(task, incarnation)
        if task.state is not TaskState.CONNECTED:
            task.session = 0
            self.roster.move(task, TaskState.CONNECTED, now)
        else:
            self.roster.touch(task)

    def time_out(self, wait: Wait, now: float) -> None:
        """Ends a wait for all tasks with the names of those who have not come."""
        if wait.leaving:
            gone = TaskState.DISCONNECTED
            absent = [t.task_id for t in self.roster.tasks if t.state is not gone and t.task_id not in self._leaving]
            self._fail_leaving(absent, Code.DEADLINE_EXCEEDED, now)
            return
        absent = [t.task_id for t in self.roster.tasks if t.state is not TaskState.CONNECTED and t.task_id not in self._registering]
        missing = self.roster.missing(absent, now)
        total = len(self.roster)
        self._end(wait)
        sentence = f"{total - len(missing)} of {total} registered, missing {name_processes(missing)}; waited {now - wait.since:.1f} s"
        self._reply(wait.call, refusal=Refusal(Code.DEADLINE_EXCEEDED, sentence, missing=missing))

    # ---- Staying and going ---------------------------------------------------------------------------------------------------------

    def heartbeat(self, call: Any, task_id: int, incarnation: int, now: float) -> None:
        """Answers an agent's sign of life with the state of its task."""
        task = self.roster.get(task_id)
        refusal: Refusal | None = None
        if task is None:
            refusal = self._no_task(task_id)
        elif task.state is TaskState.ERROR:
            refusal = task.error
        elif task.agent == 0 or task.state is not TaskState.CONNECTED:
            refusal = Refusal(Code.INVALID_ARGUMENT, f"process {task_id} is not registered; expected a registration before a heartbeat")
        elif task.agent != incarnation:
            refusal = Refusal(Code.ABORTED, f"process {task_id} has been restarted; this heartbeat is from a former life of it")
        elif not task.session:
            task.last_seen = now
        self._reply(call, self.config.incarnation, refusal)

    def answer_session(self, call: Any, task_id: int) -> None:
        """Answers a Session's sign of life with the state of its task."""
        self._reply(call, self.config.incarnation, self.roster.tasks[task_id].error)

    def states(self, call: Any, task_ids: Sequence[int]) -> None:
        """Answers with those of `task_ids` that the job has."""
        self._reply(call, [task_id for task_id in task_ids if self.roster.get(task_id) is not None])

    def tick(self, now: float) -> None:
        """Lets time pass: deadlines, and once a second a look for tasks that have fallen silent."""
        self.timers.expire(now)
        if now < self._next_scan:
            return
        self._next_scan = now + 1.0
        limit = self.config.heartbeat_timeout_s
        for task in self.roster.tasks:
            if task.state is TaskState.CONNECTED and task.last_seen is not None and now - task.last_seen > limit:
                who = name_processes(self.roster.missing([task.task_id], now))
                self._fail(
                    task, Refusal(Code.UNAVAILABLE, f"{who} is lost: its heartbeat timeout is {limit:g} s", source_task=task.task_id), now
                )

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self._next_scan, self.timers.next_due())

    def report_error(self, call: Any, task_id: int, code: int, message: str, now: float, session: bool = True) -> None:
        """Puts a task into ERROR at its own word. An agent beside a Session speaks for itself alone, and is let go."""
        task = self.roster.get(task_id)
        if task is None or task.state is not TaskState.CONNECTED:
            refusal = self._no_task(task_id) if task is None else Refusal(Code.FAILED_PRECONDITION, f"process {task_id} is not connected")
            self._reply(call, refusal=refusal)
            return
        self._reply(call)
        if task.session and not session:
            self._drop_agent(task)
            return
        known = Code(code) if 0 < code <= Code.UNAUTHENTICATED else Code.UNKNOWN
        text = message.encode()[: self.config.limits.error_bytes].decode(errors="ignore")
        sentence = f"process {task_id} reported: {text}"
        self._fail(task, Refusal(known, sentence, source_task=task_id, reported=True), now)

    def _fail(self, task: Task, error: Refusal, now: float) -> None:
        self._lose(task, TaskState.ERROR, now, error)
        self._propagate(error)

    def _lose(self, task: Task, state: TaskState, now: float, error: Refusal | None = None) -> None:
        """Moves a task out of CONNECTED, and fails what can no longer be."""
        self.roster.move(task, state, now, error)
        (lost,) = self.roster.missing([task.task_id], now)
        self.barriers.fail_lost(task.task_id, now)
        self.keys.fail_needing(lost)
        if self.devices.waiting:
            sentence = f"devices cannot be enumerated: {name_processes([lost])} is lost"
            self.devices.fail(Refusal(Code.INTERNAL, sentence, missing=(lost,)))
        self._look_at_leaving(now)
        poll = self._polls.pop(task.task_id, None)
        if poll is not None:
            self._reply(poll.call, refusal=error or Refusal(Code.CANCELLED, f"process {task.task_id} has shut down"))
        self.looks.look()

    def _propagate(self, error: Refusal) -> None:
        """Makes an error everyone's, unless the job is recoverable."""
        if self.config.recoverable:
            return
        self.error = self.error or error
        for wait in self._polls.values():
            self._reply(wait.call, refusal=error)
        self._polls = {}

    def poll_for_error(self, call: Any, task_id: int, now: float) -> None:
        """Answers with the first error that is everyone's; never with success, which would crash jaxlib's client."""
        task = self.roster.get(task_id)
        if task is None:
            self._reply(call, refusal=self._no_task(task_id))
        elif self.error is not None or task.error is not None:
            self._reply(call, refusal=task.error or self.error)
        elif task.state is not TaskState.CONNECTED:
            sentence = f"process {task_id} is not registered; expected a registration before a poll"
            self._reply(call, refusal=Refusal(Code.FAILED_PRECONDITION, sentence))
        elif self.config.survivable:
            self._reply(call, refusal=Refusal(Code.CANCELLED, "errors are told at the next call: the service may be restarted"))
        else:
            older = self._polls.get(task_id)
            if older is not None:
                self._reply(older.call, refusal=Refusal(Code.CANCELLED, "a newer poll took this one's place"))
            self._polls[task_id] = Wait(call, task_id, self, now)

    def shut_down(self, call: Any, task_id: int, session: bool, now: float, timeout_s: float | None = None) -> None:
        """Takes leave: with all others at the shutdown barrier, or alone where the job is recoverable or there is no time to wait."""
        task = self.roster.get(task_id)
        timeout_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        if task is None:
            self._reply(call, refusal=self._no_task(task_id))
        elif task.state is not TaskState.CONNECTED:
            self._reply(call, refusal=task.error)
        elif not session and task.session:  # the agent goes; the process stays, by its Session
            self._reply(call)
            self._drop_agent(task)
        elif self.config.recoverable or timeout_s <= 0:
            self._reply(call)
            self._leave(task, now)
        else:
            older = self._leaving.pop(task_id, None)
            if older is not None:
                older.done = True
                self._reply(older.call, refusal=Refusal(Code.CANCELLED, f"a newer call of process {task_id} took this one's place"))
            wait = self._leaving[task_id] = Wait(call, task_id, self, now, leaving=True)
            self.timers.add(now + timeout_s, wait)
            self._look_at_leaving(now)

    def _drop_agent(self, task: Task) -> None:
        self.roster.set_agent(task, 0)
        poll = self._polls.pop(task.task_id, None)
        if poll is not None:
            self._reply(poll.call, refusal=Refusal(Code.CANCELLED, f"process {task.task_id} has shut down"))
        self.roster.touch(task)
        self.looks.look()

    def _leave(self, task: Task, now: float) -> None:
        self._lose(task, TaskState.DISCONNECTED, now)
        self.roster.set_agent(task, 0)
        task.session = 0
        task.last_seen = now

    def _look_at_leaving(self, now: float) -> None:
        """Lets all go together, once all who have not gone alone have come to the shutdown barrier; or fails it."""
        if not self._leaving:
            return
        dead = [task.task_id for task in self.roster.tasks if task.state is TaskState.ERROR]
        if dead:
            self._fail_leaving(dead, Code.INTERNAL, now)
        elif all(task.task_id in self._leaving for task in self.roster.tasks if task.state is not TaskState.DISCONNECTED):
            leaving, self._leaving = self._leaving, {}
            for wait in leaving.values():
                wait.done = True
                self._reply(wait.call)
            for task_id in leaving:
                self._leave(self.roster.tasks[task_id], now)

    def _fail_leaving(self, absent: Sequence[int], code: Code, now: float) -> None:
        missing = self.roster.missing(absent, now)
        came = f"{len(self._leaving)} of {len(self.roster)} had come"
        refusal = Refusal(code, f"Shutdown barrier has failed: {came}, missing {name_processes(missing)}", missing=missing)
        leaving, self._leaving = self._leaving, {}
        for wait in leaving.values():
            wait.done = True
            self._reply(wait.call, refusal=refusal)
        self._propagate(refusal)

    # ---- Keys and barriers ---------------------------------------------------------------------------------------------------------

    def barrier(self, arrival: Arrival, now: float, repeated: bool = False) -> None:
        """Lets a task come to a barrier; `repeated` says that its call named a task twice."""
        if repeated:
            sentence = f"barrier {arrival.name!r}: process {arrival.task_id} named a participant twice"
            self._reply(arrival.call, refusal=Refusal(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, arrival.counter)))
        elif not self.roster.connected(arrival.task_id):
            self._reply(arrival.call, refusal=self._not_there(arrival.task_id, now))
        else:
            self.barriers.arrive(arrival, now)

    def _not_there(self, task_id: int, now: float) -> Refusal:
        task = self.roster.get(task_id)
        if task is None:
            return self._no_task(task_id)
        if task.state is TaskState.UNINITIALIZED:
            return Refusal(Code.INVALID_ARGUMENT, f"process {task_id} is not registered; expected a registration first")
        cause = f": {task.error.message}" if task.error else ""
        return Refusal(
            Code.INTERNAL, f"process {task_id} takes no part in the job any more{cause}", missing=self.roster.missing([task_id], now)
        )

    def report(self, call: Any, task_id: int, step: int | None, saved_step: int | None, values: dict[str, float]) -> None:
        """Notes how far a process has come."""
        progress, most = self.roster.tasks[task_id].progress, self.config.limits.report_values
        if len(progress.values | values) > most or any(len(name) > 100 for name in values):
            sentence = f"a report of {len(progress.values | values)} values; expected at most {most}, with names of at most 100 characters"
            self._reply(call, refusal=Refusal(Code.RESOURCE_EXHAUSTED, sentence))
            return
        progress.step = progress.step if step is None else step
        progress.saved_step = progress.saved_step if saved_step is None else saved_step
        progress.values |= values
        self._reply(call)

    def waiting_calls(self) -> Counter[int]:
        """Returns how many calls of each task wait."""
        waits = [getter.task_id for getter in self.keys.waiting()]
        waits += [task_id for barrier in self.barriers.open.values() for task_id in barrier.waiting]
        waits += [*self._registering, *self._leaving, *(wait.task_id for wait in self._gathering.values())]
        return Counter(task_id for task_id in waits if self.roster.get(task_id) is not None)

    # ---- Calls that go away --------------------------------------------------------------------------------------------------------

    def drop(self, call: Any) -> None:
        """Forgets a call whose client has gone away, without an answer."""
        if self.keys.drop(call) or self.devices.drop(call) or self.looks.drop(call):
            return
        if call in self._gathering:
            self._gathering.pop(call).done = True
            return
        for by_task in (self._registering, self._polls, self._leaving):
            for task_id, wait in by_task.items():
                if wait.call is call:
                    wait.done = True
                    del by_task[task_id]
                    return
        self._drop_at_barrier(call)

    def _drop_at_barrier(self, call: Any) -> None:
        for barrier in self.barriers.open.values():
            for task_id, waiting in barrier.waiting.items():
                if waiting is call:
                    del barrier.waiting[task_id]
                    return

    def _end(self, wait: Wait) -> None:
        wait.done = True
        self._gathering.pop(wait.call, None)
        if self._registering.get(wait.task_id) is wait:
            del self._registering[wait.task_id]

    def forget_changes(self) -> None:
        """Forgets what a journal would have to write, where there is none."""
        for dirty in (self.roster.dirty, self.keys.dirty, self.barriers.dirty):
            dirty.clear()

    # ---- Its end -------------------------------------------------------------------------------------------------------------------

    def over_since(self) -> float | None:
        """Returns since when every task has been gone, None while one is there or before the first has come."""
        gone = [task for task in self.roster.tasks if task.task_id in self.roster.lost]
        if len(gone) < len(self.roster):
            return None
        return max(task.state_since for task in gone)

    def all_shut_down(self) -> bool:
        """Says whether every task has taken leave."""
        return all(task.state is TaskState.DISCONNECTED for task in self.roster.tasks)

    def leaving(self) -> dict[int, float]:
        """Returns who waits at the shutdown barrier, and since when."""
        return {task_id: wait.since for task_id, wait in self._leaving.items()}


__all__ = ["Config", "Machine"]

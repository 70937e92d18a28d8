"""The coordination service as one pure machine: (event, now) -> effects, with no socket, thread, lock or clock.

An event is a method; its effects are replies, appended to `replies`, each to a `call`: any hashable that stands for a caller who waits.
Every transport, the tests and the simulator drive this machine. A task's two channels and their lives are told in `_tasks`, barriers in
`_barriers`, how tasks come in `_coming`, how they take leave together in `_leaving`. Rules that span them are here:

- A task that is lost (silent too long, shut down, or in error) fails at once every barrier that it takes part in.
- Unless the job is recoverable, the first error is everyone's: it reaches every poll, and stays.
- An incarnation of the service is a secret of those who have registered: no refusal holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..limits import Config
from .barriers import Arrival, Barriers
from .devices import Devices
from .keys import Keys
from .registration import Registration
from .shutdown_barrier import ShutdownBarrier
from .status import Code, Completion, Status, name_processes
from .task_table import Task, TaskState, TaskTable
from .timers import Timers
from .watches import Looks


class Machine:
    """Decides what each call ends with. Not safe for several threads; `now` is in seconds and never goes back."""

    def __init__(self, config: Config, now: float) -> None:
        self.config = config
        self.started = now
        self.replies: list[Completion] = []
        self.timers = Timers()
        self.roster = TaskTable(config.num_tasks)
        self.keys = Keys(config.limits, self.timers, self.replies)
        self.barriers = Barriers(config.limits, self.roster, self.timers, self.replies, config.recoverable)
        self.looks = Looks(self.roster, self.timers, self.replies)
        self.devices = Devices(config.num_tasks, self.replies)
        self.coming = Registration(
            config, self.roster, self.timers, self.replies, lose=self._lose, propagate=self._propagate, connected=self.looks.look
        )
        self.leaving = ShutdownBarrier(self.roster, self.timers, self.replies, leave=self._leave, propagate=self._propagate)
        self.error: Status | None = None  # the first one that is everyone's
        self._polls: dict[int, Any] = {}  # task: the call that waits for an error
        self._next_scan = now + 1.0

    # ---- Who calls -----------------------------------------------------------------------------------------------------------------

    def check(self, task_id: int | None, task_incarnation: int, service_incarnation: int, now: float) -> int | Status:
        """Returns which task an agent's call comes from; refuses one for another service, or from a former life of its task.

        jaxlib's agents leave `Incarnations.task_id` empty: calls that name no source task are told apart by the task's incarnation.
        """
        if service_incarnation != self.config.incarnation:
            sentence = (
                "the call names another life of the coordination service: it was restarted without its journal, or never registered with"
            )
            return Status(Code.INTERNAL, sentence, mismatch=service_incarnation)
        known = self.roster.by_agent.get(task_incarnation)
        if known is None or task_id not in (None, known):
            if task_id is not None and self.roster.get(task_id) is None:
                return self.roster.no_task(task_id)
            who = "a process" if task_id is None else f"process {task_id}"
            return Status(Code.ABORTED, f"{who} has shut down or been restarted; this call is from a former life of it")
        task = self.roster.tasks[known]
        if not task.session and task.state is TaskState.CONNECTED:
            task.last_seen = now
        return known

    def _reply(self, call: Any, value: Any = None, refusal: Status | None = None) -> None:
        self.replies.append(Completion(call, value, refusal))

    def seen(self, task_id: int, now: float) -> None:
        """Notes a sign of life on a Session."""
        self.roster.tasks[task_id].last_seen = now

    # ---- Staying and going ---------------------------------------------------------------------------------------------------------

    def heartbeat(self, call: Any, task_id: int, incarnation: int, now: float) -> None:
        """Answers an agent's sign of life with the state of its task."""
        task = self.roster.get(task_id)
        refusal: Status | None = None
        if task is None:
            refusal = self.roster.no_task(task_id)
        elif task.state is TaskState.ERROR:
            refusal = task.error
        elif task.agent == 0 or task.state is not TaskState.CONNECTED:
            refusal = Status(Code.INVALID_ARGUMENT, f"process {task_id} is not registered; expected a registration before a heartbeat")
        elif task.agent != incarnation:
            refusal = Status(Code.ABORTED, f"process {task_id} has been restarted; this heartbeat is from a former life of it")
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
                    task, Status(Code.UNAVAILABLE, f"{who} is lost: its heartbeat timeout is {limit:g} s", source_task=task.task_id), now
                )

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self._next_scan, self.timers.next_due())

    def report_error(self, call: Any, task_id: int, code: int, message: str, now: float, session: bool = True) -> None:
        """Puts a task into ERROR at its own word. An agent beside a Session speaks for itself alone, and is let go."""
        task = self.roster.get(task_id)
        if task is None or task.state is not TaskState.CONNECTED:
            refusal = (
                self.roster.no_task(task_id) if task is None else Status(Code.FAILED_PRECONDITION, f"process {task_id} is not connected")
            )
            self._reply(call, refusal=refusal)
            return
        self._reply(call)
        if task.session and not session:
            self._drop_agent(task)
            return
        known = Code(code) if 0 < code <= Code.UNAUTHENTICATED else Code.UNKNOWN
        text = message.encode()[: self.config.limits.error_bytes].decode(errors="ignore")
        sentence = f"process {task_id} reported: {text}"
        self._fail(task, Status(known, sentence, source_task=task_id, reported=True), now)

    def _fail(self, task: Task, error: Status, now: float) -> None:
        self._lose(task, TaskState.ERROR, now, error)
        self._propagate(error)

    def _lose(self, task: Task, state: TaskState, now: float, error: Status | None = None) -> None:
        """Moves a task out of CONNECTED, and fails what can no longer be."""
        self.roster.move(task, state, now, error)
        (lost,) = self.roster.missing([task.task_id], now)
        self.barriers.fail_lost(task.task_id, now)
        self.keys.fail_needing(lost)
        if self.devices.waiting:
            sentence = f"devices cannot be enumerated: {name_processes([lost])} is lost"
            self.devices.fail(Status(Code.INTERNAL, sentence, missing=(lost,)))
        self.leaving.look(now)
        poll = self._polls.pop(task.task_id, None)
        if poll is not None:
            self._reply(poll, refusal=error or Status(Code.CANCELLED, f"process {task.task_id} has shut down"))
        self.looks.look()

    def _propagate(self, error: Status) -> None:
        """Makes an error everyone's, unless the job is recoverable."""
        if self.config.recoverable:
            return
        self.error = self.error or error
        for call in self._polls.values():
            self._reply(call, refusal=error)
        self._polls = {}

    def poll_for_error(self, call: Any, task_id: int, now: float) -> None:
        """Answers with the first error that is everyone's; never with success, which would crash jaxlib's client."""
        task = self.roster.get(task_id)
        if task is None:
            self._reply(call, refusal=self.roster.no_task(task_id))
        elif self.error is not None or task.error is not None:
            self._reply(call, refusal=task.error or self.error)
        elif task.state is not TaskState.CONNECTED:
            sentence = f"process {task_id} is not registered; expected a registration before a poll"
            self._reply(call, refusal=Status(Code.FAILED_PRECONDITION, sentence))
        elif self.config.survivable:
            self._reply(call, refusal=Status(Code.CANCELLED, "errors are told at the next call: the service may be restarted"))
        else:
            older = self._polls.get(task_id)
            if older is not None:
                self._reply(older, refusal=Status(Code.CANCELLED, "a newer poll took this one's place"))
            self._polls[task_id] = call

    def shut_down(self, call: Any, task_id: int, session: bool, now: float, timeout_s: float | None = None) -> None:
        """Takes leave: with all others at the shutdown barrier, or alone where the job is recoverable or there is no time to wait."""
        task = self.roster.get(task_id)
        timeout_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        if task is None:
            self._reply(call, refusal=self.roster.no_task(task_id))
        elif task.state is not TaskState.CONNECTED:
            self._reply(call, refusal=task.error)
        elif not session and task.session:  # the agent goes; the process stays, by its Session
            self._reply(call)
            self._drop_agent(task)
        elif self.config.recoverable or timeout_s <= 0:
            self._reply(call)
            self._leave(task, now)
        else:
            self.leaving.come(call, task_id, now, timeout_s)

    def _drop_agent(self, task: Task) -> None:
        self.roster.set_agent(task, 0)
        poll = self._polls.pop(task.task_id, None)
        if poll is not None:
            self._reply(poll, refusal=Status(Code.CANCELLED, f"process {task.task_id} has shut down"))
        self.roster.touch(task)
        self.looks.look()

    def _leave(self, task: Task, now: float) -> None:
        self._lose(task, TaskState.DISCONNECTED, now)
        self.roster.set_agent(task, 0)
        task.session = 0
        task.last_seen = now

    # ---- Keys and barriers ---------------------------------------------------------------------------------------------------------

    def barrier(self, arrival: Arrival, now: float, repeated: bool = False) -> None:
        """Lets a task come to a barrier; `repeated` says that its call named a task twice."""
        if repeated:
            sentence = f"barrier {arrival.name!r}: process {arrival.task_id} named a participant twice"
            self._reply(arrival.call, refusal=Status(Code.INVALID_ARGUMENT, sentence, barrier=(arrival.name, arrival.counter)))
        elif not self.roster.connected(arrival.task_id):
            self._reply(arrival.call, refusal=self._not_there(arrival.task_id, now))
        else:
            self.barriers.arrive(arrival, now)

    def _not_there(self, task_id: int, now: float) -> Status:
        task = self.roster.get(task_id)
        if task is None:
            return self.roster.no_task(task_id)
        if task.state is TaskState.UNINITIALIZED:
            return Status(Code.INVALID_ARGUMENT, f"process {task_id} is not registered; expected a registration first")
        cause = f": {task.error.message}" if task.error else ""
        return Status(
            Code.INTERNAL, f"process {task_id} takes no part in the job any more{cause}", missing=self.roster.missing([task_id], now)
        )

    def report(self, call: Any, task_id: int, step: int | None, saved_step: int | None, values: dict[str, float]) -> None:
        """Notes how far a process has come."""
        progress, most = self.roster.tasks[task_id].progress, self.config.limits.report_values
        if len(progress.values | values) > most or any(len(name) > 100 for name in values):
            sentence = f"a report of {len(progress.values | values)} values; expected at most {most}, with names of at most 100 characters"
            self._reply(call, refusal=Status(Code.RESOURCE_EXHAUSTED, sentence))
            return
        progress.step = progress.step if step is None else step
        progress.saved_step = progress.saved_step if saved_step is None else saved_step
        progress.values |= values
        self._reply(call)

    def waiting_calls(self) -> Counter[int]:
        """Returns how many calls of each task wait."""
        waits = [getter.task_id for getter in self.keys.waiting()]
        waits += [task_id for barrier in self.barriers.open.values() for task_id in barrier.waiting]
        waits += [*self.coming.waiting(), *self.leaving.waiting()]
        return Counter(task_id for task_id in waits if self.roster.get(task_id) is not None)

    # ---- Calls that go away --------------------------------------------------------------------------------------------------------

    def drop(self, call: Any) -> None:
        """Forgets a call whose client has gone away, without an answer."""
        if any(part.drop(call) for part in (self.keys, self.devices, self.looks, self.coming, self.leaving)):
            return
        for task_id, poll in self._polls.items():
            if poll is call:
                del self._polls[task_id]
                return
        self._drop_at_barrier(call)

    def _drop_at_barrier(self, call: Any) -> None:
        for barrier in self.barriers.open.values():
            for task_id, waiting in barrier.waiting.items():
                if waiting is call:
                    del barrier.waiting[task_id]
                    return

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

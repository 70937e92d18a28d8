"""The coordination service as one state machine: (state, event, now) -> (state, effects), with no
socket, thread, lock or clock.

The state is the tasks of one job, its keys and its barriers. An event is a method call. An effect
is a `Completion`, appended to `completions`: it ends a `call`, which is any hashable that stands
for a waiting caller. The same events at the same times give the same effects, so every transport,
the tests and the simulator drive this machine. Each part holds its own transitions: `registration`
(how tasks come), `shutdown_barrier` (how they leave together), `barriers`, `keys`, `watches`,
`liveness`, `devices`; `task_table` holds the states of a task. Transitions that span the parts are
here:

- A task that is lost (silent too long, shut down, or in error) fails at once every barrier that it
  takes part in.
- Before the job has gathered nobody is in error for its silence, and who has a connection is not
  silent: it waits for the others.
- Time in which the service itself stood still is nobody's silence.
- Unless the job is recoverable, the first error is everyone's: it reaches every poll, and stays.
- An incarnation of the service is a secret of those who have registered: no error message holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..limits import Config
from ..names import NEXT_KEY
from .barriers import Arrival, Barriers, repeated
from .devices import Devices
from .events import EventLog
from .keys import Keys
from .liveness import LivenessBarrier
from .registration import Registration
from .shutdown_barrier import ShutdownBarrier
from .status import (
    KEY,
    TASK,
    Changes,
    Code,
    Completions,
    Encodings,
    Status,
    clip,
    name_gone,
    name_processes,
)
from .task_table import Participants, Task, TaskState, TaskTable
from .timers import Timers
from .watches import TaskWatches

_SCAN_INTERVAL_S = 1.0
# Keys that a thread of ours waits for in every healthy process.
OUR_WAITS = ("holdfast/sync/", NEXT_KEY)
STANDSTILL_S = 1.0
"""A tick that comes later than this after it was due comes from a service that stood still, and
heard nobody.
"""


class Machine:
    """Decides how each call ends. Not safe for several threads; `now` is in seconds and never goes
    back.
    """

    def __init__(self, config: Config, now: float) -> None:
        self.config = config
        self.started = now
        self.completions = Completions()
        self.timers = Timers()
        self.encodings = Encodings()
        self.changes = Changes()
        self.events = EventLog(config.limits.events, self.changes)
        self.task_table = TaskTable(config.num_tasks, self.events, self.changes)
        self.participants = Participants(config.limits, self.task_table.everyone)
        waits = (self.task_table, self.timers, self.completions)
        self.keys = Keys(config.limits, self.timers, self.completions, self.changes)
        self.barriers = Barriers(
            config.limits, *waits, changes=self.changes, recoverable=config.recoverable
        )
        self.watches = TaskWatches(self.task_table, self.completions)
        self.liveness = LivenessBarrier(config.limits, *waits, changes=self.changes)
        self.devices = Devices(config.num_tasks, self.completions)
        self.registration = Registration(
            config,
            *waits,
            lose=self._lose,
            propagate=self._propagate,
            connected=self._tasks_changed,
            replace=self.barriers.fail_replaced,
        )
        self.shutdown_barrier = ShutdownBarrier(
            *waits, leave=self._leave, propagate=self._propagate
        )
        self.error: Status | None = None  # the first error that is everyone's
        self._saved_step: int | None = None
        self._polls: dict[int, Any] = {}  # task: the call that waits for an error
        self._next_scan = now + _SCAN_INTERVAL_S
        self.fenced: list[int] = []  # tasks that were given up, whose Sessions are to end

    def load(self, *, gathered: bool, error: Status | None) -> None:
        """Puts in what a journal holds of the job as a whole."""
        self.registration.load(gathered)
        self.error = error

    def take_fenced(self) -> list[int]:
        """Returns the tasks given up since the last call: the service ends their Sessions."""
        fenced = self.fenced
        self.fenced = []
        return fenced

    # --- Who calls

    def identify(
        self,
        task_id: int | None,
        task_incarnation: int,
        service_incarnation: int,
        now: float,
        *,
        lost: bool = False,
    ) -> int | Status:
        """Returns the task that an agent's call comes from; an error for a call to another service,
        or from a former life of its task.

        jaxlib's agents leave `Incarnations.task_id` empty: calls that name no source task are told
        apart by the task's incarnation. `lost` lets in the calls by which a lost process learns
        that it is lost, and ends.
        """
        if service_incarnation != self.config.incarnation:
            sentence = (
                "the call names another life of the coordination service: it was restarted without"
                " its journal, or never registered with"
            )
            return Status(Code.INTERNAL, sentence, mismatch=service_incarnation)
        known = self.task_table.by_agent.get(task_incarnation)
        if known is None or task_id not in (None, known):
            if task_id is not None and self.task_table.get(task_id) is None:
                return self.task_table.no_such_task(task_id)
            who = "a process" if task_id is None else f"process {task_id}"
            return Status(
                Code.ABORTED,
                f"{who} has shut down or been restarted; this call is from a former life of it",
            )
        task = self.task_table.tasks[known]
        if task_incarnation in task.former and not lost:
            return self.task_table.fenced(task)
        if not task.session and task.state is TaskState.CONNECTED:
            task.heard(now)
            task.trust()
        return known

    def _fail_call(self, call: Any, code: Code, sentence: str) -> None:
        self.completions.fail(call, Status(code, sentence))

    def _no_such_task(self, call: Any, task_id: int) -> None:
        self.completions.fail(call, self.task_table.no_such_task(task_id))

    def seen(self, task_id: int, now: float) -> None:
        """Notes a sign of life on a Session."""
        self.task_table.tasks[task_id].heard(now)

    def detach(self, task_id: int) -> None:
        """Notes that a task's Session has no stream any more."""
        self.task_table.tasks[task_id].detach()

    # --- Lives of tasks

    def heartbeat(self, call: Any, task_id: int, incarnation: int, now: float) -> None:
        """Answers an agent's sign of life with the state of its task."""
        task = self.task_table.get(task_id)
        if task is None:
            self._no_such_task(call, task_id)
        elif task.error is not None:
            self.completions.fail(call, task.error)
        elif task.agent == 0 or task.state is not TaskState.CONNECTED:
            sentence = (
                f"process {task_id} is not registered; expected a registration before a heartbeat"
            )
            self._fail_call(call, Code.INVALID_ARGUMENT, sentence)
        elif task.agent != incarnation:
            sentence = (
                f"process {task_id} has been restarted; this heartbeat is from a former life of it"
            )
            self._fail_call(call, Code.ABORTED, sentence)
        else:
            # A Session is silent while a call of C holds the interpreter, and the agent's threads
            # go on. One whose stream is gone is another matter: its client has given up.
            if not task.session or task.attached:
                task.heard(now)
            self.completions.succeed(call, self.config.incarnation)

    def heartbeat_session(self, call: Any, task_id: int) -> None:
        """Answers a Session's sign of life with the state of its task."""
        error = self.task_table.tasks[task_id].error
        if error is None:
            self.completions.succeed(call, self.config.incarnation)
        else:
            self.completions.fail(call, error)

    def states(self, call: Any, task_ids: Sequence[int]) -> None:
        """Answers with those of `task_ids` that the job has."""
        there = [task_id for task_id in task_ids if self.task_table.get(task_id) is not None]
        self.completions.succeed(call, there)

    def tick(self, now: float) -> None:
        """Lets time pass: expires deadlines and, once a second, fails the tasks that have fallen
        silent.
        """
        self.timers.expire(now)
        if now < self._next_scan:
            return
        if now - self._next_scan > STANDSTILL_S:
            self.task_table.forgive(now - self._next_scan, now)
        self._next_scan = now + _SCAN_INTERVAL_S
        self.encodings.forget_unused()
        for task in self.task_table.tasks:
            if task.state is TaskState.CONNECTED and task.last_seen is not None:
                self._scan(task, now - task.last_seen, now)

    def _scan(self, task: Task, silent_s: float, now: float) -> None:
        """Gives a task up that has been silent, or suspect, for too long."""
        limit_s = self.config.heartbeat_timeout_s
        if silent_s > limit_s:
            self._give_up(task, f"its heartbeat timeout is {limit_s:g} s", now)
            return
        # While the job gathers a closed connection says little: the heartbeat alone decides.
        if task.suspect_since is None or not self.registration.gathered:
            return
        grace_s = self.config.reconnect_grace_s
        if now - task.suspect_since > grace_s:
            why = (
                "its side closed the connection without a goodbye, and it did not come back"
                f" within {grace_s:g} s"
            )
            self._give_up(task, why, now)

    def suspect(self, task_id: int, now: float) -> None:
        """Notes that the side of a task has closed its connection without a goodbye: that is how
        the kernel ends those of one that died.

        It is lost after `reconnect_grace_s`, unless it is heard of before; while the job gathers
        its heartbeat alone decides.
        """
        self.task_table.tasks[task_id].suspect(now)

    def _give_up(self, task: Task, why: str, now: float) -> None:
        """Loses a silent task. Before the job has gathered it is merely not there, and may come
        again.
        """
        if not self.registration.gathered:
            if not task.attached:
                self._lose(task, TaskState.DISCONNECTED, now)
            return
        who = name_processes(self.task_table.missing([task.task_id], now))
        self._end_life(task, f"{who} is lost: {why}", now)

    def _end_life(self, task: Task, why: str, now: float) -> None:
        """Loses a task, whose incarnations never come back."""
        task.end_life()
        self.fenced.append(task.task_id)
        self._fail(task, Status(Code.UNAVAILABLE, why, source_task=task.task_id), now)

    def report_exit(self, task_id: int, exit_code: int, now: float) -> Status | None:
        """Loses a task whose end its launcher has seen; one that has left, or is lost already,
        stays as it is.

        jaxlib's agents do not say on whom a get depends: those of processes without a Session fail
        too, as their launcher ends the job.
        """
        task = self.task_table.get(task_id)
        if task is None:
            return self.task_table.no_such_task(task_id)
        if task.state is not TaskState.CONNECTED:
            return None
        task.note_end(exit_code)
        if not self.registration.gathered:
            task.end_life()
            self._lose(task, TaskState.DISCONNECTED, now)
            return None
        who = name_processes(self.task_table.missing([task_id], now))
        self._end_life(task, f"{who} is lost", now)
        (lost,) = self.task_table.missing([task_id], now)
        agents = {each.task_id for each in self.task_table.tasks if each.agent and not each.session}
        self.keys.fail_unnamed(lost, agents)
        return None

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self._next_scan, self.timers.next_due())

    def end_attempt(self, why: str) -> None:
        """Takes no process in any more: those that outlive the attempt join another."""
        self.registration.end_attempt(Status(Code.ABORTED, why))

    def report_error(
        self, call: Any, task_id: int, code: int, message: str, now: float, *, session: bool = True
    ) -> None:
        """Puts a task into ERROR at its own request. An agent beside a Session speaks for itself
        alone, and is let go.
        """
        task = self.task_table.get(task_id)
        if task is None:
            self._no_such_task(call, task_id)
            return
        if task.state is not TaskState.CONNECTED:
            sentence = f"process {task_id} is not connected"
            self._fail_call(call, Code.FAILED_PRECONDITION, sentence)
            return
        self.completions.succeed(call)
        if task.session and not session:
            self._drop_agent(task)
            return
        known = Code(code) if 0 < code <= Code.UNAUTHENTICATED else Code.UNKNOWN
        text = clip(message, self.config.limits.error_bytes)
        sentence = f"process {task_id} reported: {text}"
        self._fail(task, Status(known, sentence, source_task=task_id, reported=True), now)

    def _fail(self, task: Task, error: Status, now: float) -> None:
        self._lose(task, TaskState.ERROR, now, error)
        self._propagate(error)

    def _lose(self, task: Task, state: TaskState, now: float, error: Status | None = None) -> None:
        """Moves a task out of CONNECTED, and fails what needed it."""
        self.task_table.move(task, state, now, error)
        (lost,) = self.task_table.missing([task.task_id], now)
        self.barriers.fail_lost(task.task_id, now)
        self.keys.fail_dependents(lost)
        if self.devices.waiting:
            sentence = f"devices cannot be enumerated: {name_gone([lost])}"
            self.devices.fail(Status(Code.INTERNAL, sentence, missing=(lost,)))
        self.shutdown_barrier.resolve(now)
        self._end_poll(task, error)
        self._tasks_changed()

    def _end_poll(self, task: Task, error: Status | None = None) -> None:
        poll = self._polls.pop(task.task_id, None)
        if poll is not None:
            over = Status(Code.CANCELLED, f"process {task.task_id} has shut down")
            self.completions.fail(poll, error or over)

    def _tasks_changed(self) -> None:
        self.liveness.resolve()
        self.watches.notify()

    def _propagate(self, error: Status) -> None:
        """Makes an error everyone's, unless the job is recoverable."""
        if self.config.recoverable:
            return
        if self.error is None:
            self.error = error
            # the journal writes the job's error when it writes a task
            self.changes.mark(TASK, error.source_task or 0)
        self.completions.fail_all(self._polls.values(), error)
        self._polls = {}

    def poll_for_error(self, call: Any, task_id: int) -> None:
        """Answers with the first error that is everyone's; never with success, which would crash
        jaxlib's client.
        """
        task = self.task_table.get(task_id)
        if task is None:
            self._no_such_task(call, task_id)
            return
        error = task.error or self.error
        if error is not None:
            self.completions.fail(call, error)
        elif task.state is not TaskState.CONNECTED:
            sentence = f"process {task_id} is not registered; expected a registration before a poll"
            self._fail_call(call, Code.FAILED_PRECONDITION, sentence)
        elif self.config.survivable:
            sentence = "errors are reported at the next call: the service may be restarted"
            self._fail_call(call, Code.CANCELLED, sentence)
        else:
            older = self._polls.get(task_id)
            if older is not None:
                self._fail_call(older, Code.CANCELLED, "a newer poll took this one's place")
            self._polls[task_id] = call

    def shut_down(
        self, call: Any, task_id: int, session: bool, now: float, timeout_s: float | None = None
    ) -> None:
        """Shuts a task down: with all others at the shutdown barrier, or alone where the job is
        recoverable or there is no time to wait.
        """
        task = self.task_table.get(task_id)
        timeout_s = self.config.shutdown_timeout_s if timeout_s is None else timeout_s
        if task is None:
            self._no_such_task(call, task_id)
        elif task.state is not TaskState.CONNECTED:
            # An error would abort jaxlib's client, which only wants to end.
            if session and task.error is not None:
                self.completions.fail(call, task.error)
            else:
                self.completions.succeed(call)
        elif not session and task.session:  # the agent goes; the process stays, by its Session
            self.completions.succeed(call)
            self._drop_agent(task)
        elif self.config.recoverable or timeout_s <= 0:
            self.completions.succeed(call)
            self._leave(task, now)
        else:
            self.shutdown_barrier.arrive(call, task_id, now, timeout_s)

    def _drop_agent(self, task: Task) -> None:
        self.task_table.set_agent(task, 0)
        self._end_poll(task)
        self.task_table.touch(task)
        self._tasks_changed()

    def _leave(self, task: Task, now: float) -> None:
        task.note_left()
        self._lose(task, TaskState.DISCONNECTED, now)
        self.task_table.set_agent(task, 0)
        self.task_table.set_session(task, 0)
        task.heard(now)

    # --- Keys and barriers

    def barrier(self, arrival: Arrival, now: float, twice: bool = False) -> None:
        """Lets a task arrive at a barrier; `twice` says that its call named a task so."""
        if twice:
            self.completions.fail(arrival.call, repeated(arrival))
        elif not self.task_table.connected(arrival.task_id):
            self.completions.fail(arrival.call, self._not_connected(arrival.task_id, now))
        else:
            self.barriers.arrive(arrival, now)

    def _not_connected(self, task_id: int, now: float) -> Status:
        task = self.task_table.get(task_id)
        if task is None:
            return self.task_table.no_such_task(task_id)
        if task.state is TaskState.UNINITIALIZED:
            return Status(
                Code.INVALID_ARGUMENT,
                f"process {task_id} is not registered; expected a registration first",
            )
        cause = f": {task.error.message}" if task.error else ""
        return Status(
            Code.INTERNAL,
            f"process {task_id} takes no part in the job any more{cause}",
            missing=self.task_table.missing([task_id], now),
        )

    def report(
        self,
        call: Any,
        task_id: int,
        now: float,
        *,
        values: Mapping[str, float] = MappingProxyType({}),
        again: bool = False,
        **given: Any,
    ) -> None:
        """Notes how far a process has come. `given` are fields of TaskProgress; what is None keeps
        its value. What is reported `again`, lest a service that was restarted lack it, is no news.
        """
        task = self.task_table.tasks[task_id]
        most = self.config.limits.report_values
        count = len(task.progress.values.keys() | values.keys())
        if count > most or any(len(name) > 100 for name in values):
            sentence = (
                f"a report of {count} values; expected at most {most}, with names of at most 100"
                " characters"
            )
            self._fail_call(call, Code.RESOURCE_EXHAUSTED, sentence)
            return
        trouble = clip(given.get("trouble") or "", self.config.limits.error_bytes)
        if given.get("trouble") is not None:
            given["trouble"] = trouble
        task.progress.update(values, **given)
        step = given.get("step")
        if step is not None:
            task.steps.note(step, now)
        saved_step = given.get("saved_step")
        if saved_step is not None and (not again or self._saved_step is None):
            self._note_save(saved_step, now, again=again)
        if trouble and not again:
            self.events.note("trouble", f"process {task_id}: {trouble}", now, task_id)
        self.completions.succeed(call)

    def _note_save(self, saved_step: int, now: float, *, again: bool) -> None:
        """Notes a step that is saved, once for the job."""
        if saved_step == self._saved_step:
            return
        self._saved_step = saved_step
        if not again:
            self.events.note("saved", f"step {saved_step} is saved", now)

    def waiting_calls(self) -> Counter[int]:
        """Returns how many calls of each task's program wait. What a thread of ours waits for all
        the time is not counted.
        """
        waits = [wait.task_id for wait in self.keys.waiting() if not wait.key.startswith(OUR_WAITS)]
        for barrier in self.barriers.open.values():
            waits.extend(barrier.waiting)
        waits.extend(self.registration.waiting())
        waits.extend(self.shutdown_barrier.waiting())
        return Counter(task_id for task_id in waits if self.task_table.get(task_id) is not None)

    # --- Calls that go away

    def drop(self, call: Any) -> None:
        """Forgets a call whose client has gone away, without an answer."""
        parts = (
            self.keys,
            self.devices,
            self.watches,
            self.liveness,
            self.registration,
            self.shutdown_barrier,
        )
        if any(part.drop(call) for part in parts):
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

    def touch_all(self) -> None:
        """Has a journal that begins anew write everything."""
        self.changes.clear()
        for task_id in self.task_table.everyone:
            self.changes.mark(TASK, task_id)
        for key in self.keys.values:
            self.changes.mark(KEY, key)
        self.barriers.touch_all()
        self.events.touch_all()
        self.liveness.touch_all()

    # --- The end

    def over_since(self) -> float | None:
        """Returns since when every task has been gone, None while one is there or before the first
        has come.
        """
        if len(self.task_table.lost) < len(self.task_table):
            return None
        return max(task.state_since for task in self.task_table.tasks)

    def deserted(self) -> bool:
        """Returns whether processes came before the job had gathered, and none of them is there any
        more.
        """
        if self.registration.gathered or self.task_table.connected_count:
            return False
        if self.registration.waiting():
            return False
        return any(task.last_seen is not None for task in self.task_table.tasks)

    def all_shut_down(self) -> bool:
        """Returns whether every task has shut down."""
        return self.task_table.counts[TaskState.DISCONNECTED] == len(self.task_table)

"""The coordination service as one state machine: (state, event, now) -> (state, effects), with no
socket, thread, lock or clock.

The state is the tasks of one job, its keys and its barriers. An event is a method call. An effect
is the answer to a `Call`, which then stands among the machine's `answers`. The same events at the
same times give the same effects, so every transport, the tests and the simulator drive this
machine. Each part holds its own transitions: `registration` (how tasks come), `shutdown_barrier`
(how they leave together), `barriers`, `keys`, `watches`, `polls`, `liveness`, `devices`;
`task_table` holds the states of a task. Transitions that span the parts are here:

- A task that is lost (silent too long, shut down, or in error) fails at once every barrier that it
  takes part in.
- Before the job has gathered nobody is in error for its silence, and who has a connection is not
  silent: it waits for the others.
- Time in which the service itself stood still is nobody's silence.
- A recoverable job to which a new life comes when all former ones have died begins anew: nothing of
  its keys, barriers and devices is left.
- Unless the job is recoverable, the first error is everyone's: it reaches every poll, and stays.
- An incarnation of the service is a secret of those who have registered: no error message holds it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from holdfast.proto import session_pb2

from ..limits import Config
from ..names import GROW_KEY, LAST_WORDS, NEXT_KEY
from .barriers import Arrival, Barriers, repeated
from .calls import Call, Timers
from .devices import Devices
from .events import EventLog
from .gathering import ShutdownBarrier
from .keys import Keys
from .liveness import LivenessBarrier
from .registration import Registration
from .status import (
    ALIVE,
    BARRIER,
    EVENT,
    KEY,
    TASK,
    Changes,
    Code,
    Encodings,
    Status,
    clip,
    name_gone,
    name_processes,
)
from .task_table import Participants, Task, TaskState, TaskTable
from .watches import Polls, TaskWatches

_SCAN_INTERVAL_S = 1.0
# Keys that a thread of ours waits for in healthy processes.
OUR_WAITS = ("holdfast/sync/", NEXT_KEY, GROW_KEY)
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
        self.answers: list[Call] = []
        self.timers = Timers()
        self.encodings = Encodings()
        self.changes = Changes()
        self.events = EventLog(config.limits.events, self.changes)
        self.task_table = TaskTable(config.num_tasks, self.events, self.changes, self._fail_needy)
        self.participants = Participants(config.limits, self.task_table.everyone)
        self.keys = Keys(config.limits, self.timers, self.changes)
        tasks = (self.task_table, self.timers)
        self.barriers = Barriers(
            config.limits, *tasks, self.changes, recoverable=config.recoverable
        )
        self.watches = TaskWatches(self.task_table)
        self.polls = Polls(config, self.task_table, self.changes)
        self.liveness = LivenessBarrier(config.limits, *tasks, self.changes)
        self.devices = Devices(config.num_tasks)
        self.registration = Registration(
            config,
            *tasks,
            polls=self.polls,
            barriers=self.barriers,
            begin_anew=self._begin_anew,
        )
        self.shutdown_barrier = ShutdownBarrier(*tasks, self.polls)
        self._told: dict[str, float] = {}  # steps in the history, by kind of event
        self._next_scan = now + _SCAN_INTERVAL_S
        self.fenced: list[int] = []  # tasks that were given up, whose Sessions are to end

    def take_answers(self) -> list[Call]:
        """Returns the calls that were answered since the last call, for who sends that."""
        self.watches.notify()
        taken = self.answers[:]
        self.answers.clear()
        return taken

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

    def seen(self, task_id: int, now: float) -> None:
        """Notes a sign of life on a Session."""
        self.task_table.tasks[task_id].heard(now)

    def detach(self, task_id: int) -> None:
        """Notes that a task's Session has no stream any more."""
        self.task_table.tasks[task_id].detach()

    # --- Lives of tasks

    def heartbeat(self, call: Call) -> None:
        """Answers a sign of life with the state of its task."""
        task = self.task_table.tasks[call.task_id]
        if task.error is not None:
            call.fail(task.error)
        elif call.session:
            call.succeed(self.config.incarnation)
        elif task.agent == 0 or task.state is not TaskState.CONNECTED:
            sentence = (
                f"process {call.task_id} is not registered; expected a registration before a"
                " heartbeat"
            )
            call.refuse(Code.INVALID_ARGUMENT, sentence)
        elif task.agent != call.incarnation:
            sentence = (
                f"process {call.task_id} has been restarted; this heartbeat is from a former life"
                " of it"
            )
            call.refuse(Code.ABORTED, sentence)
        else:
            # A Session is silent while a call of C holds the interpreter, and the agent's threads
            # go on. One whose stream is gone is another matter: its client has given up.
            if not task.session or task.attached:
                task.heard(call.came)
            call.succeed(self.config.incarnation)

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
                self.task_table.lose(task, TaskState.DISCONNECTED, now)
            return
        who = name_processes(self.task_table.missing([task.task_id], now))
        self._end_life(task, f"{who} is lost: {why}", now)

    def _end_life(self, task: Task, why: str, now: float) -> None:
        """Loses a task, whose incarnations never come back."""
        task.end_life()
        self.fenced.append(task.task_id)
        self._fail(task, Status(Code.UNAVAILABLE, why, source_task=task.task_id), now)

    def report_exit(self, task_id: int, exit_code: int, now: float) -> None:
        """Loses a task whose end its launcher has seen; one that has left, or is lost already,
        stays as it is.

        jaxlib's agents do not say on whom a get depends: those of processes without a Session fail
        too, as their launcher ends the job.
        """
        task = self.task_table.tasks[task_id]
        # Whose launcher waits for these words has heard of the end: they are not of the next life.
        self.keys.remove(f"{LAST_WORDS}/{task_id}")
        if task.state is not TaskState.CONNECTED:
            return
        task.note_end(exit_code)
        if not self.registration.gathered:
            task.end_life()
            self.task_table.lose(task, TaskState.DISCONNECTED, now)
            return
        who = name_processes(self.task_table.missing([task_id], now))
        self._end_life(task, f"{who} is lost", now)
        (lost,) = self.task_table.missing([task_id], now)
        agents = {each.task_id for each in self.task_table.tasks if each.agent and not each.session}
        self.keys.fail_dependents(lost, agents)

    def _begin_anew(self, comer: Task, now: float) -> None:
        """Forgets what the former lives of all tasks have left, but for the history."""
        if comer.state is TaskState.CONNECTED:
            self.task_table.lose(comer, TaskState.DISCONNECTED, now)
        over = Status(Code.ABORTED, "this life of the process is over: the job has begun anew")
        self.keys.forget(over, self.task_table.everyone)
        self.barriers.forget()
        self.devices.forget()
        self._told.clear()
        for task in self.task_table.tasks:
            if task.attached:
                self.fenced.append(task.task_id)
            self.task_table.renew(task)
        text = "nobody of the former lives is left: the job begins anew"
        self.events.note("coordinator", text, now)

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self._next_scan, self.timers.next_due())

    def report_error(self, call: Call, code: int, message: str) -> None:
        """Puts a task into ERROR at its own request. An agent beside a Session speaks for itself
        alone, and is let go.
        """
        task = self.task_table.tasks[call.task_id]
        who = f"process {call.task_id}"
        if task.state is not TaskState.CONNECTED:
            call.refuse(Code.FAILED_PRECONDITION, f"{who} is not connected")
            return
        call.succeed()
        if task.session and not call.session:
            self._drop_agent(task)
            return
        known = Code(code) if 0 < code <= Code.UNAUTHENTICATED else Code.UNKNOWN
        sentence = f"{who} reported: {clip(message, self.config.limits.error_bytes)}"
        self._fail(
            task, Status(known, sentence, source_task=call.task_id, reported=True), call.came
        )

    def _fail(self, task: Task, error: Status, now: float) -> None:
        self.task_table.lose(task, TaskState.ERROR, now, error)
        self.polls.propagate(error)

    def _fail_needy(self, task: Task, now: float) -> None:
        """Fails what needs a task that is lost."""
        (lost,) = self.task_table.missing([task.task_id], now)
        self.barriers.fail_lost(task.task_id, now)
        self.keys.fail_dependents(lost)
        sentence = f"devices cannot be enumerated: {name_gone([lost])}"
        self.devices.fail(Status(Code.INTERNAL, sentence, missing=(lost,)))
        self.shutdown_barrier.resolve(now)
        self.polls.end(task)
        self.liveness.resolve()

    def shut_down(self, call: Call) -> None:
        """Shuts a task down: with all others at the shutdown barrier, or alone where the job is
        recoverable or there is no time to wait.
        """
        task = self.task_table.tasks[call.task_id]
        if call.deadline == math.inf:
            call.wait_until(call.came + self.config.shutdown_timeout_s)
        if task.state is not TaskState.CONNECTED:
            # An error would abort jaxlib's client, which only wants to end.
            if call.session and task.error is not None:
                call.fail(task.error)
            else:
                call.succeed()
        elif not call.session and task.session:  # the agent goes; the process stays, by its Session
            call.succeed()
            self._drop_agent(task)
        elif self.config.recoverable or call.deadline <= call.came:
            call.succeed()
            self.task_table.leave(task, call.came)
        else:
            self.shutdown_barrier.arrive(call)

    def _drop_agent(self, task: Task) -> None:
        self.task_table.set_agent(task, 0)
        self.polls.end(task)
        self.task_table.touch(task)

    # --- Keys and barriers

    def get(self, call: Call, key: str) -> None:
        """Answers with a key's value, when it is set; fails where who alone can set it is lost."""
        self.keys.get(call, key)
        for lost in self.task_table.missing(call.depends_on & self.task_table.lost, call.came):
            self.keys.fail_dependents(lost)

    def barrier(self, arrival: Arrival, twice: bool = False) -> None:
        """Lets a task arrive at a barrier; `twice` says that its call named a task so."""
        if twice:
            arrival.call.fail(repeated(arrival))
        elif not self.task_table.connected(arrival.task_id):
            arrival.call.fail(self._not_connected(arrival.task_id, arrival.call.came))
        else:
            self.barriers.arrive(arrival)

    def _not_connected(self, task_id: int, now: float) -> Status:
        task = self.task_table.tasks[task_id]
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

    def report(self, call: Call, report: session_pb2.ReportRequest, *, again: bool = False) -> None:
        """Notes how far a process has come: what its report leaves out keeps its value. What is
        reported `again`, lest a service that was restarted lack it, is no news.
        """
        task_id = call.task_id
        now = call.came
        task = self.task_table.tasks[task_id]
        progress = task.progress
        most = self.config.limits.report_values
        count = len({*progress.values, *report.values})
        if count > most or any(len(name) > 100 for name in report.values):
            sentence = (
                f"a report of {count} values; expected at most {most}, with names of at most 100"
                " characters"
            )
            call.refuse(Code.RESOURCE_EXHAUSTED, sentence)
            return
        if report.HasField("root"):
            progress.ClearField("root")  # which is told as a whole
        progress.MergeFrom(report)
        if report.HasField("step"):
            task.steps.note(report.step, now)
        if report.HasField("saved_step"):
            self._note_step("saved", report.saved_step, now, again=again)
        if "restored_step" in report.values:
            self._note_step("restored", report.values["restored_step"], now, again=again)
        if report.trouble and not again:
            self.events.note("trouble", f"process {task_id}: {report.trouble}", now, task_id)
        call.succeed()

    def _note_step(self, kind: str, step: float, now: float, *, again: bool) -> None:
        """Notes what was done with a step, once for the job."""
        if step == self._told.get(kind):
            return
        if again:
            self._told.setdefault(kind, step)
        else:
            self._told[kind] = step
            self.events.note(kind, f"step {step:.0f} is {kind}", now)

    def waiting_calls(self) -> Counter[int]:
        """Returns how many calls of each task's program wait. What a thread of ours waits for all
        the time is not counted.
        """
        waits = [call for key, call in self.keys.waiting() if not key.startswith(OUR_WAITS)]
        for barrier in self.barriers.open.values():
            waits.extend(barrier.waiting.values())
        for line in (self.registration.agents, self.registration.sessions, self.shutdown_barrier):
            waits.extend(line.values())
        return Counter(each.task_id for each in waits if self.task_table.get(each.task_id))

    def touch_all(self) -> None:
        """Has a journal that begins anew write everything."""
        self.changes.clear()
        barriers = self.barriers.open | self.barriers.finished
        for barrier in barriers.values():
            barrier.touch()
        held: dict[str, Iterable[str | int]] = {
            TASK: self.task_table.everyone,
            KEY: self.keys.values,
            BARRIER: barriers,
            EVENT: self.events.kept,
            ALIVE: self.liveness.answers,
        }
        for table, keys in held.items():
            for key in keys:
                self.changes.mark(table, key)

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
        if self.registration.agents or self.registration.sessions:
            return False
        return any(task.last_seen is not None for task in self.task_table.tasks)

    def all_shut_down(self) -> bool:
        """Returns whether every task has shut down."""
        return self.task_table.counts[TaskState.DISCONNECTED] == len(self.task_table)

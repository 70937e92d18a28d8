"""How tasks come: agents register, Sessions open, and all are answered once the job is complete.
Pure.

A task that comes while a former life of it is still connected ends that life first, where the job
is recoverable; else it is refused, and the error is everyone's. A Session that opens beside an
agent, or an agent that registers beside a Session, is of the same life.

In a recoverable job a new life that comes when all former lives have died begins the job anew: it
waits for all, as at the first time. Where nobody ends the coordinator, processes that are started
again as a whole would else be answered one by one, and take what the former ones have left for each
other's.
"""

from __future__ import annotations

from collections.abc import Callable

from ..limits import Config
from .barriers import Barriers
from .calls import Call, Line, Timers
from .status import LEFT, Code, Status, name_processes
from .task_table import Task, TaskState, TaskTable
from .watches import Polls


class Registration:
    """Holds the calls that wait for the job to be complete; `gathered` says whether all tasks have
    been connected at one time.
    """

    def __init__(
        self,
        config: Config,
        task_table: TaskTable,
        timers: Timers,
        *,
        polls: Polls,
        barriers: Barriers,
        begin_anew: Callable[[Task, float], None],
    ) -> None:
        self._config = config
        self._begin_anew = begin_anew
        self._task_table = task_table
        self._polls = polls
        self._barriers = barriers
        self.gathered = False
        self._over: Status | None = None  # why nobody is taken in any more
        self.agents = Line(timers, self._timed_out)  # those that register
        self.sessions = Line(timers, self._timed_out)

    def load(self, gathered: bool) -> None:
        """Puts in what a journal holds."""
        self.gathered = gathered

    # --- Agents

    def register(self, call: Call) -> None:
        """Registers an agent; answers when every task of the job has come."""
        task = self._task_table.get(call.task_id)
        if task is None:
            count = len(self._task_table)
            sentence = (
                f"Unexpected task registered with task={call.task_id}: the job has {count}, 0 to"
                f" {count - 1}"
            )
            call.refuse(Code.INVALID_ARGUMENT, sentence)
            return
        refusal = self._may_register(task, call)
        if refusal is not None:
            call.fail(refusal)
            return
        if not task.session:
            task.heard(call.came)
        older = self.agents.get(call.task_id)
        is_new = older is not None and older.incarnation != call.incarnation
        self.agents.replace(call, Code.ALREADY_EXISTS if is_new else Code.CANCELLED)
        self._gather(call.came)

    def _may_register(self, task: Task, call: Call) -> Status | None:
        # Profile A's calls name no process: an incarnation that two processes shared would let one
        # speak for the other.
        if self._task_table.by_agent.get(call.incarnation, task.task_id) != task.task_id:
            return Status(
                Code.INVALID_ARGUMENT,
                f"process {task.task_id} came with the incarnation of another; expected a random"
                " number",
            )
        if call.incarnation in task.former:
            return self._task_table.fenced(task)
        if self._over is not None:
            return self._over
        is_known = task.session or task.agent == call.incarnation
        early = None
        if not (task.state is TaskState.CONNECTED and is_known):
            early = self._begin_anew_if_deserted(task, call.came)
        return early or self._may_come_again(task, call.incarnation)

    def _may_come_again(self, task: Task, incarnation: int) -> Status | None:
        """Decides whether an agent may take the place of a former one; no is everyone's error."""
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
        refusal = Status(Code.ABORTED, sentence, source_task=task.task_id)
        self._polls.propagate(refusal)
        return refusal

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
            status = None
            if task.session or task.state is not TaskState.CONNECTED:
                status = self._begin_anew_if_deserted(task, now)
            status = status or self._may_come_back(task, incarnation)
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
            self._polls.propagate(status)
        return status

    def _begin_life(self, task: Task, now: float) -> None:
        """Connects a task. A former Session's life ends first; an agent alone is of the process
        whose Session opens beside it.
        """
        if task.state is TaskState.CONNECTED and task.session:
            task.end_life()
            self._task_table.lose(task, TaskState.DISCONNECTED, now)
        if task.state is not TaskState.CONNECTED:
            self._task_table.set_agent(task, 0)
        self._task_table.move(task, TaskState.CONNECTED, now)

    # --- All of them

    def _begin_anew_if_deserted(self, comer: Task, now: float) -> Status | None:
        """Has the job begin anew where a new life of a task comes when all former lives have died:
        its processes were started again as a whole. Returns why that is not known yet: who is
        suspect may come back.

        One that has left in order may be done, and come no more: who has died does not wait for it.
        Nor is it certain that it comes as a new life: its goodbye may have lacked an answer.
        """
        if not self._config.recoverable or not self.gathered or self._over is not None:
            return None
        suspects = []
        for task in self._task_table.tasks:
            if task.ended == LEFT:
                return None
            if task is comer or task.state is not TaskState.CONNECTED:
                continue
            if task.attached or task.suspect_since is None:
                return None
            suspects.append(task.task_id)
        if suspects:
            who = name_processes(self._task_table.missing(suspects, now))
            sentence = f"whether {who} comes back is not known yet; ask again"
            # An error of the service's own would end jaxlib's client; others it tries again after.
            return Status(Code.UNAVAILABLE, sentence, from_service=False)
        self._begin_anew(comer, now)
        self.gathered = False
        return None

    def held(self, task_id: int) -> bool:
        """Returns whether a task is connected or waits to be."""
        return self._task_table.connected(task_id) or task_id in self.agents

    def wait_for_all(self, call: Call) -> None:
        """Answers a Session when every task of the job has come."""
        if self._over is not None:
            call.fail(self._over)
            return
        self.sessions.enter(call)
        self._gather(call.came)

    def end_attempt(self, why: str) -> None:
        """Fails those that wait for all, now and later: there is another attempt to join."""
        self._over = Status(Code.ABORTED, why)
        self.sessions.fail(self._over)
        self.agents.fail(self._over)

    def _gather(self, now: float) -> None:
        """Connects the agents that register, once all tasks have come."""
        if not self.gathered:
            if self._task_table.connected_count + len(self.agents) < len(self._task_table):
                return  # counts answer nearly all who come, without a look at all who wait
            here = self._task_table.connected_count + sum(
                not self._task_table.connected(task_id) for task_id in self.agents
            )
            if here < len(self._task_table):
                return
            self.gathered = True
            # A process that waited for the others sent no heartbeat: its time begins now.
            for task in self._task_table.tasks:
                if task.attached:
                    task.heard(now)
        for task_id, call in self.agents.items():
            # before the answer: an agent sends its first heartbeat after it
            self._connect_agent(self._task_table.tasks[task_id], call.incarnation, now)
        self.agents.succeed(self._config.incarnation)
        self.sessions.succeed(self._config.incarnation)

    def _connect_agent(self, task: Task, incarnation: int, now: float) -> None:
        if not task.session or task.state is not TaskState.CONNECTED:
            task.heard(now)
        if task.state is TaskState.CONNECTED and task.agent == incarnation:
            return
        if task.state is TaskState.CONNECTED and task.agent and not task.session:
            task.end_life()
            self._task_table.lose(task, TaskState.DISCONNECTED, now)
        elif task.agent:
            self._barriers.fail_replaced(task.task_id, task.agent_since)
        if task.state is TaskState.CONNECTED:
            self._task_table.set_agent(task, incarnation)
            self._task_table.touch(task)
        else:
            self._task_table.set_session(task, 0)
            self._task_table.set_agent(task, incarnation)
            self._task_table.move(task, TaskState.CONNECTED, now)

    def _timed_out(self, now: float, since: float) -> Status:
        """Returns the error of those whose time is over, with those that have not come."""
        total = len(self._task_table)
        absent = [task_id for task_id in self._task_table.everyone if not self.held(task_id)]
        came = f"{total - len(absent)} of {total} registered, missing"
        waited = f"; waited {now - since:.1f} s"
        return self._task_table.lacking(Code.DEADLINE_EXCEEDED, came, absent, now, waited)

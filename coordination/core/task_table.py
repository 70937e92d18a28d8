"""The tasks of a job with their lives, channels, signs of life and errors. Pure.

A task has up to two channels (docs/concepts.md): an agent (jaxlib's, over profile A or B) that
registers, and a Session of ours that opens. Each carries an incarnation of its own. Where there is
a Session, the task lives and dies with it.

    UNINITIALIZED --arrive--> CONNECTED --shut down--> DISCONNECTED --arrive--> CONNECTED
                                  |---silent too long, or reported an error---> ERROR --arrive
                                  (recoverable)--> CONNECTED

Lost is lost: an incarnation that was given up, or whose place another has taken, never comes back;
only a new life of its task does.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from holdfast.proto import session_pb2

from ..limits import Limits
from ..task_bits import bits_from, tasks_of
from .events import EventLog
from .status import (
    LEFT,
    MAX_NAMED,
    TASK,
    Changes,
    Code,
    Missing,
    Status,
    beyond,
    name_processes,
)
from .step_rate import StepRate

_FORMER_KEPT = 16  # a process that was started again more often has long ended its first lives


class TaskState(IntEnum):
    """The states of profile A."""

    UNINITIALIZED = 1
    DISCONNECTED = 2
    CONNECTED = 3
    ERROR = 4


@dataclass(slots=True)
class Task:
    """One process of the job, by its distributed id. An incarnation of 0 says that there is no such
    channel.
    """

    task_id: int
    state: TaskState = TaskState.UNINITIALIZED
    agent: int = 0
    session: int = 0
    host: str = ""
    pid: int = 0
    last_seen: float | None = None
    state_since: float = 0.0
    error: Status | None = None
    ended: str = ""  # how this life ended, where it left or a launcher saw it
    owner: str = ""  # in a secured service: a digest of the key that this task's calls hold
    version: int = 0  # of the table, when this task last changed
    life: int = 0  # which life of the task this is; an agent and a Session beside it have one
    agent_since: int = 0  # the table's version when the agent came
    session_since: int = 0
    attached: bool = False  # its Session has a stream now
    # since when its side has closed the connection without a goodbye, unheard of
    suspect_since: float | None = None
    # incarnations that are over for good, the latest last
    former: list[int] = field(default_factory=list)
    # what it last reported of its own work
    progress: session_pb2.ReportRequest = field(default_factory=session_pb2.ReportRequest)
    steps: StepRate = field(default_factory=StepRate, compare=False)  # not kept in a journal

    def incarnation(self, session: bool) -> int:
        """Returns the incarnation as peers on the same kind of channel know it: Sessions know a
        life by its number, agents by a random one.
        """
        return self.life if session else self.agent or self.session

    def heard(self, now: float) -> None:
        """Notes a sign of life."""
        self.last_seen = now

    def suspect(self, now: float) -> None:
        """Notes that the task's side has closed the connection without a goodbye."""
        self.suspect_since = now

    def trust(self) -> None:
        """Takes a suspicion back."""
        self.suspect_since = None

    def attach(self, host: str, pid: int, now: float) -> None:
        """Notes that the task's Session has a stream."""
        self.host = host
        self.pid = pid
        self.attached = True
        self.heard(now)
        self.trust()

    def detach(self) -> None:
        """Notes that the task's Session has no stream."""
        self.attached = False

    def set_agent(self, incarnation: int, version: int) -> None:
        """Takes an agent that came at a version of the table; 0 lets it go."""
        if incarnation:
            self.life += not self.session
            self.agent_since = version
        self.agent = incarnation

    def set_session(self, incarnation: int, version: int) -> None:
        """Takes a Session, which came at a version of the table if it is new; 0 lets it go."""
        if incarnation not in (0, self.session):
            self.life += not self.agent
            self.session_since = version
        self.session = incarnation

    def own(self, owner: str) -> None:
        """Gives the task to the holder of a key."""
        self.owner = owner

    def enter(self, state: TaskState, now: float, error: Status | None) -> None:
        """Enters a state, with the error that put the task there."""
        self.state = state
        self.state_since = now
        self.error = error
        if state is TaskState.CONNECTED:
            self.ended = ""
            self.trust()

    def change(self, version: int) -> None:
        """Notes the version of the table at which something changed that watchers see."""
        self.version = version

    def note_end(self, exit_code: int) -> None:
        """Notes how the process ended, as its launcher saw it."""
        if exit_code < 0:
            self.ended = f"ended by signal {-exit_code}"
        else:
            self.ended = f"ended with exit code {exit_code}"

    def note_left(self) -> None:
        """Notes that the process leaves in order."""
        self.ended = LEFT

    def end_life(self) -> None:
        """Notes that the incarnations of the task are over for good."""
        over = [
            incarnation
            for incarnation in (self.session, self.agent)
            if incarnation and incarnation not in self.former
        ]
        self.former = (self.former + over)[-_FORMER_KEPT:]

    def renew(self) -> None:
        """Ends the life for good: the task is as if it had never come, but for what tells later
        lives from earlier ones.
        """
        self.end_life()
        self.session = 0
        self.attached = False
        self.suspect_since = None
        self.state = TaskState.UNINITIALIZED
        self.error = None
        self.host = ""
        self.pid = 0
        self.ended = ""
        self.last_seen = None
        self.progress = session_pb2.ReportRequest()
        self.steps = StepRate()

    def forgive(self, seconds: float, now: float) -> None:
        """Takes back a silence that was the service's own."""
        if self.last_seen is not None:
            self.last_seen = min(now, self.last_seen + seconds)
        if self.suspect_since is not None:
            self.suspect_since = min(now, self.suspect_since + seconds)


class TaskTable:
    """All tasks of the job. Each change that watchers see raises `version`, and each of a task's
    state `moves`. `lost(task, now)` is called when a task is no longer CONNECTED.
    """

    def __init__(
        self,
        num_tasks: int,
        events: EventLog,
        changes: Changes,
        lost: Callable[[Task, float], None] = lambda task, now: None,
    ) -> None:
        self.events = events
        self._changes = changes
        self._on_loss = lost
        self.tasks = [Task(task_id) for task_id in range(num_tasks)]
        self.everyone = frozenset(range(num_tasks))
        self.by_agent: dict[int, int] = {}  # incarnation of an agent: its task
        self.counts = Counter({TaskState.UNINITIALIZED: num_tasks})
        self.version = 0
        self.moves = 0
        self.latest_life = 0  # the version at which the latest life began
        # tasks that were CONNECTED and no longer are: no barrier can wait for them
        self.lost: set[int] = set()
        self.owned = Counter({"": num_tasks})  # owner: the number of its tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def get(self, task_id: int) -> Task | None:
        """Returns the task, None where the job has none of that number."""
        return self.tasks[task_id] if 0 <= task_id < len(self.tasks) else None

    def no_such_task(self, task_id: int) -> Status:
        """Returns the error of a call that names a task that the job does not have."""
        return Status(
            Code.INVALID_ARGUMENT,
            f"there is no process {task_id}: the job has {len(self)}, 0 to {len(self) - 1}",
        )

    def connected(self, task_id: int) -> bool:
        """Returns whether the task is CONNECTED."""
        task = self.get(task_id)
        return task is not None and task.state is TaskState.CONNECTED

    @property
    def connected_count(self) -> int:
        """The number of tasks that are CONNECTED."""
        return self.counts[TaskState.CONNECTED]

    def _begin_life(self) -> None:
        self.version += 1
        self.latest_life = self.version

    def set_agent(self, task: Task, incarnation: int) -> None:
        """Sets a task's agent, 0 for none."""
        self.by_agent.pop(task.agent, None)
        if incarnation:
            self.by_agent[incarnation] = task.task_id
            self._begin_life()
        task.set_agent(incarnation, self.version)

    def set_session(self, task: Task, incarnation: int) -> None:
        """Sets a task's Session, 0 for none."""
        if incarnation not in (0, task.session):
            self._begin_life()
        task.set_session(incarnation, self.version)

    def life_of(self, task_id: int, incarnation: int) -> int:
        """Returns the version at which an incarnation of a task came."""
        task = self.tasks[task_id]
        return task.session_since if incarnation == task.session else task.agent_since

    def begun_until(self, version: int) -> int:
        """Returns the tasks whose present life had begun by `version`, as bits."""
        if self.latest_life <= version:
            return -1
        return ~sum(
            1 << task.task_id
            for task in self.tasks
            if max(task.agent_since, task.session_since) > version
        )

    def set_owner(self, task: Task, owner: str) -> None:
        """Gives a task to the holder of a key."""
        self.owned[task.owner] -= 1
        if not self.owned[task.owner]:
            del self.owned[task.owner]
        task.own(owner)
        self.owned[owner] += 1
        self._changes.mark(TASK, task.task_id)

    def move(self, task: Task, state: TaskState, now: float, error: Status | None = None) -> None:
        """Moves a task into a state, with the error that put it there."""
        self.counts[task.state] -= 1
        self.counts[state] += 1
        task.enter(state, now, error)
        if state is TaskState.CONNECTED:
            self.lost.discard(task.task_id)
        elif state is not TaskState.UNINITIALIZED:
            self.lost.add(task.task_id)
        self.moves += 1
        self.touch(task)
        self._note(task, now)

    def lose(self, task: Task, state: TaskState, now: float, error: Status | None = None) -> None:
        """Moves a task out of CONNECTED, which fails what needs it."""
        self.move(task, state, now, error)
        self._on_loss(task, now)

    def renew(self, task: Task) -> None:
        """Makes a task one that is yet to come."""
        self.counts[task.state] -= 1
        self.counts[TaskState.UNINITIALIZED] += 1
        task.renew()
        self.set_agent(task, 0)
        self.lost.discard(task.task_id)
        self.moves += 1
        self.touch(task)

    def leave(self, task: Task, now: float) -> None:
        """Lets a task go that leaves in order."""
        task.note_left()
        self.lose(task, TaskState.DISCONNECTED, now)
        self.set_agent(task, 0)
        self.set_session(task, 0)
        task.heard(now)

    def _note(self, task: Task, now: float) -> None:
        host = f" (host {task.host})" if task.host else ""
        who = f"process {task.task_id}{host}"
        if task.state is TaskState.CONNECTED:
            self.events.note("joined", f"{who} joined", now, task.task_id)
        elif task.state is TaskState.ERROR and task.error is not None:
            self.events.note("lost", task.error.message, now, task.task_id)
        elif task.state is TaskState.DISCONNECTED:
            self.events.note("left", f"{who} left", now, task.task_id)

    def touch(self, task: Task) -> None:
        """Notes that something about a task has changed that its watchers see."""
        self.version += 1
        task.change(self.version)
        self._changes.mark(TASK, task.task_id)

    def fenced(self, task: Task) -> Status:
        """Returns the error of an incarnation that is over for good."""
        cause = task.error.message if task.error else "another life of it has taken its place"
        sentence = (
            f"this life of process {task.task_id} is over: {cause}; end it, and start the process"
            " again"
        )
        return Status(Code.ABORTED, sentence, source_task=task.task_id)

    def forgive(self, seconds: float, now: float) -> None:
        """Takes back a silence that was the service's own."""
        for task in self.tasks:
            task.forgive(seconds, now)

    def load(self, task: Task) -> None:
        """Puts in a task that a journal holds."""
        self.counts[self.tasks[task.task_id].state] -= 1
        self.counts[task.state] += 1
        self.owned[""] -= 1
        self.owned[task.owner] += 1
        self.tasks[task.task_id] = task
        if task.agent:
            self.by_agent[task.agent] = task.task_id
        if task.state in (TaskState.DISCONNECTED, TaskState.ERROR):
            self.lost.add(task.task_id)

    def load_version(self, version: int) -> None:
        """Sets the version that a journal holds, once all its tasks are in."""
        self.version = version
        self.latest_life = max(max(task.agent_since, task.session_since) for task in self.tasks)

    def missing(self, task_ids: Iterable[int], now: float) -> tuple[Missing, ...]:
        """Describes tasks as an error names them: the first MAX_NAMED in order of their ids."""
        named = sorted(task_ids)[:MAX_NAMED]
        return tuple(self._describe(self.tasks[task_id], now) for task_id in named)

    def lacking(
        self,
        code: Code,
        what: str,
        absent: Collection[int],
        now: float,
        end: str = "",
        *,
        barrier: tuple[str, int] | None = None,
    ) -> Status:
        """Returns the error of calls that wait for tasks in vain: what has come, who has not, and
        the end of the sentence.
        """
        missing = self.missing(absent, now)
        return Status(
            code,
            f"{what} {name_processes(missing, len(absent))}{end}",
            barrier=barrier,
            missing=missing,
            absent=beyond(missing, absent),
        )

    def _describe(self, task: Task, now: float) -> Missing:
        silent_s = None if task.last_seen is None else max(0.0, now - task.last_seen)
        progress = None
        if task.progress.ListFields():
            progress = session_pb2.ReportRequest()
            progress.CopyFrom(task.progress)
            # without what may be large, and no sentence shows
            progress.ClearField("root")
            progress.ClearField("values")
        return Missing(
            task.task_id,
            host=task.host,
            silent_s=silent_s,
            lost=task.task_id in self.lost,
            progress=progress,
            ended=task.ended,
        )

    def changed_since(self, version: int) -> list[Task]:
        """Returns the tasks that have changed after `version`."""
        return [task for task in self.tasks if task.version > version]


class ParticipantsError(Exception):
    """Says that what a call sends is no set of processes."""


class Participants:
    """The sets of processes that calls send as bits, each held once: parts of the machine know a
    set by identity. The one unused for longest goes first.
    """

    def __init__(self, limits: Limits, everyone: frozenset[int]) -> None:
        self._limits = limits
        self._everyone = everyone
        self._sets: OrderedDict[bytes, frozenset[int]] = OrderedDict()
        self._held = 0  # members, and bytes of bits

    def of(self, packed: bytes) -> frozenset[int]:
        """Returns a set, the same object each time. Raises ParticipantsError for what is none."""
        named = self._sets.get(packed)
        if named is not None:
            self._sets.move_to_end(packed)
            return named
        named = self._read(packed)
        self._sets[packed] = named
        self._held += len(named) + len(packed)
        while self._held > self._limits.participants and len(self._sets) > 1:
            unused, members = self._sets.popitem(last=False)
            self._held -= len(members) + len(unused)
        return named

    def _read(self, packed: bytes) -> frozenset[int]:
        inflated = zlib.decompressobj()
        try:
            bits = inflated.decompress(packed, self._limits.tasks // 8)
        except zlib.error as error:
            raise ParticipantsError(f"participants: {error}; expected deflated bits") from None
        if not inflated.eof:
            most = self._limits.tasks
            raise ParticipantsError(
                f"participants: expected bits of at most {most} tasks, deflated"
            )
        named = tasks_of(bits_from(bits))
        return self._everyone if named == self._everyone else named

"""One coordination client as the rooms above use it: named calls, barriers, keys and errors.

A client is any object with jaxlib's method names: ours, or jaxlib's own. What only ours can do is
asked for by name and left out elsewhere. Task ids stop here: `processes` are runtime indices on the
way in and in every error.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from holdfast.coordination import BarrierTimeout, CoordinationError, CoordinatorLost, ProcessLost
from holdfast.coordination.deadline import Deadline as Deadline

from ..job import current_job
from .peers import LEFT, Health, lost

# How long an error of a lost process waits for what the coordinator pushes about it.
_PUSHED_S = 1.0
# Characters of what callers choose, in a key: a service takes 4 KiB, and keeps it.
_LONGEST_NAME = 120
# Processes that an error names: a job may have ten thousand.
_MOST_LISTED = 40
# Barriers whose calls a process numbers.
_MOST_NAMES = 20_000
_BARRIER_KINDS = ("holdfast/all/", "holdfast/some.", "holdfast/barrier/", "holdfast/barrier.")

_CODE = re.compile(r"^([A-Z][A-Z_]+): (.*)", re.DOTALL)
_MISSING = re.compile(r"(?:timed out task names:|missing process(?:es)?)(.*)", re.DOTALL)
_TASK = re.compile(r"(?:task:|^\s*|, | and )(\d+)")


def bounded_name(name: str) -> str:
    """Returns a name, or the beginning and the hash of a long one: the same in every process."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 34]}%~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class Client(Protocol):
    """What this room needs of a coordination client: the names and meanings of jaxlib's."""

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None
    ) -> None: ...
    def key_value_set_bytes(
        self, key: str, value: bytes, allow_overwrite: bool = False
    ) -> None: ...
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...
    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...
    def key_value_delete(self, key: str) -> None: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...


@dataclass(frozen=True)
class CallInstance:
    """One call of a name: `key` is where its values live, `number` counts the calls of the name.

    `barrier_id` is the service's name for its barrier. It stays the same from call to call, so that
    a name costs the service one barrier. A failed call changes it: jaxlib's agents count instances,
    and after a failure some have counted it and some have not. All processes see the failure, so
    all change alike. One that failed alone meets the others again after the next failure, because
    the id ends in the number of the call, not of the failures.
    """

    key: str
    name: str
    number: int
    barrier_id: str

    @property
    def folder(self) -> str:
        return f"{self.key}/{self.number}"


class _CallQueue:
    """The calls of this process with one name; one at a time holds `lock`.

    `number` is that of the last call. The generation of the barrier id is the number of the first
    call after the last failure, 0 when none failed. `users` are calls under way or waiting.
    """

    __slots__ = ("_generation", "_key", "_number", "_users", "lock")

    def __init__(self, key: str) -> None:
        self.lock = threading.Lock()
        self._key = key
        self._users = 0
        self._number = -1
        self._generation = 0

    @property
    def may_be_forgotten(self) -> bool:
        return not self._users and not self._generation

    def enter(self) -> None:
        self._users += 1

    def begin(self, name: str) -> CallInstance:
        self._number += 1
        barrier_id = f"{self._key}@{self._generation}" if self._generation else self._key
        return CallInstance(self._key, name, self._number, barrier_id)

    def leave(self, *, failed: bool) -> None:
        self._users -= 1
        if failed:
            self._generation = self._number + 1


class GroupClient:
    """Adapts a client. Thread-safe; calls with different names never wait for each other.

    `tasks[i]` is the task id of runtime process i (None: they are equal). Calls with one name run
    one after the other, so that the nth call of a name in one process meets the nth in every other.
    """

    def __init__(self, client: Client, tasks: Sequence[int] | None = None) -> None:
        self.client = client
        self._peers: Health | None = None
        self.renumber(tasks)
        self._lock = threading.Lock()
        self._queues: dict[str, _CallQueue] = {}
        self._barriers: dict[str, _CallQueue] = {}

    @property
    def loss_known_s(self) -> float:
        """How long after a death its report may take; 0 over jaxlib's client, which has none."""
        heartbeat_timeout_s: float | None = getattr(self.client, "heartbeat_timeout_s", None)
        return 0.0 if heartbeat_timeout_s is None else heartbeat_timeout_s + 1

    def renumber(self, tasks: Sequence[int] | None) -> None:
        """Takes the task ids of the processes, once they are known."""
        self.tasks = tasks
        self._processes = {task: process for process, task in enumerate(tasks or ())}
        if self._peers is not None:
            self._peers.renumber()

    @property
    def peers(self) -> Health:
        """The processes of the job, which are watched once somebody has asked for them."""
        with self._lock:
            if self._peers is None:
                self._peers = Health(self)
            return self._peers

    def _refuse(self, processes: Iterable[int] | None, name: str) -> None:
        """Raises ProcessLost for lives that ended (None: any)."""
        if self._peers is not None:
            self._peers.require(processes, name)

    @contextmanager
    def call(self, kind: str, name: str, deadline: Deadline) -> Iterator[CallInstance]:
        """Holds `name` for one call of this process.

        Raises BarrierTimeout when another thread holds it for the whole time.
        """
        key = f"holdfast/{kind}/{bounded_name(quote(name, safe='')) or '%'}"
        queue = self._queue(key)
        acquired = queue.lock.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX))
        with self._lock:
            # A call that has not got the name counts too: the other processes will have made it.
            call = queue.begin(name)
            if not acquired:
                queue.leave(failed=True)
        if not acquired:
            raise BarrierTimeout(
                f"another thread of this process still waits at {name!r} after"
                f" {deadline.timeout_s:g} s",
                name=name,
            )
        failed = True
        try:
            yield call
            failed = False
        finally:
            with self._lock:
                queue.leave(failed=failed)
            queue.lock.release()

    def _queue(self, key: str) -> _CallQueue:
        """Returns the calls of a name; forgets the barrier unused for longest, where too many are.

        Barriers alone: the keys of other calls hold their numbers, so all processes would have to
        forget them at the same call. A barrier's id holds one only after a failure, and then it is
        not forgotten.
        """
        with self._lock:
            queues = self._barriers if key.startswith(_BARRIER_KINDS) else self._queues
            queue = queues.pop(key) if key in queues else _CallQueue(key)
            queues[key] = queue  # the last one used is the last one
            queue.enter()
            if len(self._barriers) > _MOST_NAMES:
                oldest = next(iter(self._barriers))
                unused = self._barriers.pop(oldest)
                if not unused.may_be_forgotten:
                    self._barriers[oldest] = unused
        return queue

    def barrier(
        self, call: CallInstance, deadline: Deadline, processes: Sequence[int] | None = None
    ) -> None:
        """Waits until `processes` (None: all) have made this call.

        Raises BarrierTimeout, ProcessLost, CoordinatorLost.
        """
        self._refuse(processes, call.name)
        tasks = () if processes is None else ([self.task(process) for process in processes],)
        try:
            with self.errors(f"barrier {call.name!r}", call.name, deadline.timeout_s):
                self.client.wait_at_barrier(call.barrier_id, deadline.remaining_ms(), *tasks)
        except (BarrierTimeout, ProcessLost) as error:
            # Who is missing is what matters, and not where in this client that was heard.
            raise self._explained(error).with_traceback(None) from error.__cause__

    def _within(self, deadline: Deadline | None) -> dict[str, float]:
        """Returns how a call gets its time: ours takes one; jaxlib's own has two minutes.

        A second is the least, so that cleaning up is tried where no time is left.
        """
        if deadline is None or not self.pushes:
            return {}
        return {"timeout_s": max(1.0, deadline.remaining_s())}

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        """Raises CoordinatorLost where a call that waits for no process is not answered in time."""
        try:
            with self.errors(what):
                yield
        except CoordinationError as error:
            if error.code != "DEADLINE_EXCEEDED":
                raise
            raise CoordinatorLost(f"{what}: {error.message}") from error

    def set(self, key: str, value: bytes, deadline: Deadline | None = None) -> None:
        """Sets a key, whether it exists or not."""
        client: Any = self.client
        with self._answered(f"setting {key!r}"):
            client.key_value_set_bytes(key, value, True, **self._within(deadline))

    def insert(self, key: str, value: bytes) -> bool:
        """Sets a key that nobody has set; returns False where somebody has."""
        try:
            with self._answered(f"setting {key!r}"):
                self.client.key_value_set_bytes(key, value)
        except CoordinationError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            return False
        return True

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Sets keys, whether they exist or not: in one call over our client."""
        set_many = getattr(self.client, "key_value_set_many_bytes", None)
        if set_many is None:
            for key, value in values.items():
                self.set(key, value)
            return
        with self._answered(f"setting {len(values)} keys"):
            set_many(values)

    def get(self, key: str, name: str, deadline: Deadline, source: int) -> bytes:
        """Waits for a key that process `source` sets.

        Raises ProcessLost as soon as the loss of `source` is known, and BarrierTimeout.
        """
        try:
            self._refuse([source], name)
            value = self.wait(key, deadline, self.task(source))
        except ProcessLost as error:
            raise self._explained(error).with_traceback(None) from error.__cause__
        if value is not None:
            return value
        why = (
            f"value {name!r} did not come from process {source} in {deadline.timeout_s:g} s: it has"
            " not sent it, or hangs"
        )
        raise BarrierTimeout(why, name=name, missing=(source,))

    def wait(self, key: str, deadline: Deadline, source: int | None = None) -> bytes | None:
        """Waits for a key; returns None when it has not come in time.

        Raises ProcessLost as soon as the loss of the task `source`, which sets it, is known.
        """
        client: Any = self.client
        # jaxlib's own client does not hear of a loss.
        depends_on = {} if source is None or not self.pushes else {"depends_on": [source]}
        try:
            with self.errors(f"waiting for {key!r}"):
                return bytes(
                    client.blocking_key_value_get_bytes(key, deadline.remaining_ms(), **depends_on)
                )
        except CoordinationError as error:
            if error.code != "DEADLINE_EXCEEDED":
                raise
            return None

    def list(self, folder: str) -> dict[str, bytes]:
        """Returns the keys of a folder, by the part after it, with their values, in one call."""
        with self._answered(f"listing {folder!r}"):
            entries = self.client.key_value_dir_get_bytes(folder)
        return {key.strip("/").removeprefix(folder).strip("/"): value for key, value in entries}

    def delete(self, folder: str, deadline: Deadline | None = None) -> None:
        """Deletes a key and everything below it."""
        client: Any = self.client
        with self._answered(f"deleting {folder!r}"):
            client.key_value_delete(folder, **self._within(deadline))

    def delete_after(self, folder: str, calls: int, deadline: Deadline | None = None) -> None:
        """Deletes a folder at the last of `calls` calls, whoever makes it."""
        client: Any = self.client
        with self._answered(f"deleting {folder!r}"):
            if client.key_value_increment(f"{folder}/done", 1, **self._within(deadline)) == calls:
                client.key_value_delete(folder, **self._within(deadline))

    def task(self, process: int) -> int:
        """Returns the task id of a process. Raises ValueError for a number that the job lacks."""
        if self.tasks is None:
            return process
        if not 0 <= process < len(self.tasks):
            raise ValueError(
                f"there is no process {process}: the job has {len(self.tasks)}, 0 to"
                f" {len(self.tasks) - 1}"
            )
        return self.tasks[process]

    def process(self, task: int) -> int:
        """Returns the process with a task id."""
        if self.tasks is None:
            return task
        if task not in self._processes:
            raise ValueError(f"there is no task {task}: the job has {sorted(self.tasks)[:40]}")
        return self._processes[task]

    @property
    def pushes(self) -> bool:
        """Returns whether the client hears of other processes: ours does, jaxlib's own does not."""
        return hasattr(self.client, "watch_processes")

    def lost_tasks(self) -> Sequence[int]:
        """Returns the task ids of processes that are known to be gone."""
        return [self.task(info.process_id) for info in self.peers.gone()]

    def lost_tasks_now(self) -> Sequence[int]:
        """Returns the task ids of processes that are gone. Asks the coordinator where some are.

        A list that was pushed may be older than the return of a process that was started again.
        """
        lost = self.lost_tasks()
        if not lost:
            return lost
        client: Any = self.client  # ours: it has pushed a list
        alive = {info.process_id for info in client.process_info() if info.alive}
        return [task for task in lost if task not in alive]

    def raise_if_lost(self, processes: Collection[int], name: str) -> None:
        """Raises ProcessLost when one of `processes` is known to be gone. Asks nobody.

        Over jaxlib's own client none ever is.
        """
        self._refuse(processes, name)
        for info in self.peers.gone():
            if info.process_id in processes:
                raise lost(name, info)

    @contextmanager
    def errors(self, what: str, name: str = "", timeout_s: float = 0.0) -> Iterator[None]:
        """Turns a client's errors into those of the tree, with processes in runtime numbers."""
        try:
            yield
        except CoordinationError as error:
            raise self._renumbered(error, name) from None
        except Exception as error:
            translated = self._translated(error, what, name, timeout_s)
            if translated is None:
                raise
            raise translated from error

    def _renumbered(self, error: CoordinationError, name: str) -> CoordinationError:
        if isinstance(error, BarrierTimeout):
            error.name = name
            error.missing = tuple(sorted(self.process(task) for task in error.missing))
            error.progress = {self.process(task): report for task, report in error.progress.items()}
        elif isinstance(error, ProcessLost) and error.process is not None:
            error.process = self.process(error.process)
        return error

    def _explained(self, error: BarrierTimeout | ProcessLost) -> BarrierTimeout | ProcessLost:
        """Adds what our client knows: the last reports of the missing, why a lost one died."""
        if isinstance(error, ProcessLost):
            details = [] if error.process is None else self._deaths(error.process)
        else:
            details = [
                f"process {process} last reported {report}"
                for process, report in sorted(error.progress.items())
            ]
        news = [detail for detail in details if detail not in error.message]
        error.args = ("; ".join([error.message, *news]),)
        return error

    def _deaths(self, process: int) -> Sequence[str]:
        """Returns what the coordinator pushes about the end of a process.

        Waits for it a moment: the error may be the faster one.
        """

        def ended() -> Sequence[str]:
            return [info.error for info in self.peers.gone() if info.process_id == process]

        if self.pushes:
            self.peers.wait_for(ended, _PUSHED_S)
        return [error for error in ended() if error != LEFT]

    def _translated(
        self, error: Exception, what: str, name: str, timeout_s: float
    ) -> CoordinationError | None:
        """Reads a status text, such as `DEADLINE_EXCEEDED: Barrier timed out. ...`.

        It is all that jaxlib's client gives. What it says for developers of jaxlib stays behind
        `__cause__`.
        """
        status = _CODE.match(str(error))
        if status is None:
            return None
        code, text = status.groups()
        if code == "DEADLINE_EXCEEDED":
            missing = tuple(sorted({self.process(task) for task in _missing_tasks(text)}))
            who = f", waiting for {named(missing)}" if missing else ""
            return BarrierTimeout(
                f"{what} timed out after {timeout_s:.3g} s{who}", name=name, missing=missing
            )
        if code == "UNAVAILABLE":
            return CoordinatorLost(
                f"{what}: jax.distributed's coordinator does not answer; it lives in process 0:"
                " look at its log"
            )
        first, _, _ = text.partition("\n")
        return CoordinationError(f"{what}: {first}", code=code)


def _missing_tasks(text: str) -> list[int]:
    missing = _MISSING.search(text)
    return [int(number) for number in _TASK.findall(missing.group(1))] if missing else []


def named(processes: Sequence[int], most: int = _MOST_LISTED) -> str:
    """Returns processes in words, such as "processes 1, 2": of many so many, and how many more."""
    what = "processes" if len(processes) > 1 else "process"
    more = f" and {len(processes) - most} more" if len(processes) > most else ""
    return f"{what} {', '.join(map(str, processes[:most]))}{more}"


class _GroupClients(dict[int, GroupClient]):
    """The part of a job that has the GroupClient of each client, by the client's identity."""


def group_client_of(client: Any, tasks: Sequence[int] | None = None) -> GroupClient:
    """Returns the one GroupClient of a client, so that all its users in this process share calls.

    `tasks` counts on first use.
    """
    group_clients = current_job().ensure(_GroupClients)
    group_client = group_clients.get(id(client))
    if group_client is None:
        # One step for the interpreter: of two threads that make one, both get the same.
        group_client = group_clients.setdefault(id(client), GroupClient(client, tasks))
    return group_client


def forget_group_client(client: Any) -> None:
    """Drops the GroupClient of a client that was shut down."""
    current_job().ensure(_GroupClients).pop(id(client), None)

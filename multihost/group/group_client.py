"""One coordination client as the rooms above use it: named turns, barriers, keys, and errors in runtime numbers.

A client is any object with jaxlib's method names: ours, or jaxlib's own. What only ours can do is asked for by name and left out elsewhere.
Task ids stop here: `processes` are runtime indices on the way in and in every error.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from holdfast.coordination import BarrierTimeout, CoordinationError, CoordinatorLost, ProcessLost
from holdfast.coordination.deadline import Deadline as Deadline

# A blocking get is cut into pieces of this length: between two of them we look whether the process that should answer still lives.
_PIECE_S = 1.0

_CODE = re.compile(r"^([A-Z][A-Z_]+): (.*)", re.DOTALL)
_MISSING = re.compile(r"(?:timed out task names:|missing process(?:es)?)(.*)", re.DOTALL)
_TASK = re.compile(r"(?:task:|^\s*|, | and )(\d+)")


class Client(Protocol):
    """Is what this room needs of a coordination client: the names and meanings of jaxlib's."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None) -> None: ...
    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...
    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...
    def key_value_delete(self, key: str) -> None: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...


@dataclass(frozen=True)
class CallInstance:
    """Is one call of a name: `key` is where its values live, `number` counts the calls, `barrier_id` is what the service knows it by.

    The barrier id stays the same from turn to turn, so that a name costs the service one barrier. After a failed turn it changes: jaxlib's
    agents count instances, and after a failure some have counted it and some have not. All processes see the failure, so all change alike;
    one that failed alone meets the others again after the next failure, because the id names the turn and not the number of failures.
    """

    key: str
    name: str
    number: int
    barrier_id: str

    @property
    def folder(self) -> str:
        return f"{self.key}/{self.number}"


class GroupClient:
    """Adapts a client. Safe from several threads; calls with different names never wait for each other.

    `tasks[i]` is the task id of runtime process i (None: they are equal). Calls with one name take turns, so that the nth
    call of a name in one process meets the nth in every other.
    """

    def __init__(self, client: Client, tasks: Sequence[int] | None = None) -> None:
        self.client = client
        self.tasks = tasks
        self.progress: Callable[[], Mapping[int, str]] = dict  # what each task last reported; set by who knows whom to ask
        self.loss_known_s = 0.0  # how long after a death its news may take; set by who connected the client
        # Raises ProcessLost for lives that ended (None: any); the health of this channel's processes sets it.
        self.require: Callable[[Iterable[int] | None, str], None] = lambda processes, name: None
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}

    @contextmanager
    def turn(self, kind: str, name: str, deadline: Deadline) -> Iterator[CallInstance]:
        """Holds this process's turn at `name`. Raises BarrierTimeout when another thread holds it for the whole time."""
        key = f"holdfast/{kind}/{quote(name, safe='') or '%'}"
        with self._lock:
            line = self._lines.setdefault(key, _Line())
        waited = line.lock.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX))
        with self._lock:
            line.number += 1
            turn = CallInstance(key, name, line.number, key if not line.epoch else f"{key}@{line.epoch}")
            if not waited:
                line.epoch = line.number + 1
        if not waited:
            raise BarrierTimeout(f"another thread of this process still waits at {name!r} after {deadline.timeout_s:g} s", name=name)
        try:
            yield turn
        except BaseException:
            with self._lock:
                line.epoch = line.number + 1
            raise
        finally:
            line.lock.release()

    def barrier(self, turn: CallInstance, deadline: Deadline, processes: Sequence[int] | None = None) -> None:
        """Waits until `processes` (None: all) wait at their nth turn. Raises BarrierTimeout, ProcessLost, CoordinatorLost."""
        self.require(processes, turn.name)
        ids = () if processes is None else ([self.task(process) for process in processes],)
        try:
            with self.errors(f"barrier {turn.name!r}", turn.name, deadline.timeout_s):
                self.client.wait_at_barrier(turn.barrier_id, deadline.left_ms(), *ids)
        except (BarrierTimeout, ProcessLost) as error:
            raise self._explained(error) from error.__cause__

    def set(self, key: str, value: bytes) -> None:
        """Sets a key, whether it exists or not."""
        with self.errors(f"setting {key!r}"):
            self.client.key_value_set_bytes(key, value, True)

    def get(self, key: str, name: str, deadline: Deadline, source: int) -> bytes:
        """Waits for a key that process `source` sets; raises ProcessLost within a second of its loss being known."""
        while True:
            try:
                with self.errors(f"value {name!r}", name, deadline.timeout_s):
                    return self.client.blocking_key_value_get_bytes(key, min(deadline.left_ms(), int(_PIECE_S * 1000)))
            except CoordinationError as error:
                if error.code != "DEADLINE_EXCEEDED":
                    raise
            self.raise_if_lost([source], name)
            if not deadline.remaining_s():
                why = f"value {name!r} did not come from process {source} in {deadline.timeout_s:g} s: it has not sent it, or hangs"
                raise BarrierTimeout(why, name=name, missing=(source,))

    def list(self, folder: str) -> dict[str, bytes]:
        """Returns the keys of a folder, by the part after it, with their values, in one call."""
        with self.errors(f"listing {folder!r}"):
            entries = self.client.key_value_dir_get_bytes(folder)
        return {key.strip("/").removeprefix(folder).strip("/"): value for key, value in entries}

    def delete(self, folder: str) -> None:
        """Deletes a key and everything below it."""
        with self.errors(f"deleting {folder!r}"):
            self.client.key_value_delete(folder)

    def delete_after(self, folder: str, calls: int) -> None:
        """Deletes a folder at the last of `calls` calls, whoever makes it."""
        with self.errors(f"deleting {folder!r}"):
            if self.client.key_value_increment(f"{folder}/done", 1) == calls:
                self.client.key_value_delete(folder)

    def task(self, process: int) -> int:
        """Returns the task id of a process."""
        return process if self.tasks is None else self.tasks[process]

    def process(self, task: int) -> int:
        """Returns the process with a task id."""
        return task if self.tasks is None else list(self.tasks).index(task)

    def raise_if_lost(self, processes: Iterable[int], name: str) -> None:
        """Raises ProcessLost when the client knows that one of `processes` is gone; jaxlib's client never does. One call to the service."""
        self.require(processes, name)
        tasks = {self.task(process) for process in processes}
        with self.errors(f"{name!r}"):
            infos = [info for info in self._infos() if info.process_id in tasks]
        # Those in error first: the others may have left because of them.
        lost = [info for state in ("ERROR", "DISCONNECTED") for info in infos if info.state == state]
        if lost:
            process, host, why = self.process(lost[0].process_id), lost[0].host, lost[0].message or lost[0].state.lower()
            raise ProcessLost(
                f"{name!r} needs process {process} (host {host or 'unknown'}), which is gone: {why}", process=process, host=host or None
            )

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
        elif isinstance(error, ProcessLost) and error.process is not None:
            error.process = self.process(error.process)
        return error

    def _explained(self, error: BarrierTimeout | ProcessLost) -> BarrierTimeout | ProcessLost:
        """Adds what our client can tell of the missing: what they last reported (`Group.report`), and the error a lost one died of."""
        told: list[str] = []
        with suppress(CoordinationError):
            if isinstance(error, ProcessLost):
                told = [info.message for info in self._infos() if self.process(info.process_id) == error.process and info.message]
            elif error.missing:
                reports = self.progress()
                known = [(process, reports.get(self.task(process))) for process in error.missing]
                told = [f"process {process} last reported {report}" for process, report in known if report]
        error.args = ("; ".join([error.message, *(line for line in told if line not in error.message)]),)
        return error

    def _infos(self) -> Sequence[Any]:
        process_info: Callable[[], Sequence[Any]] = getattr(self.client, "process_info", tuple)
        return process_info()

    def _translated(self, error: Exception, what: str, name: str, timeout_s: float) -> CoordinationError | None:
        """Reads a status text such as `DEADLINE_EXCEEDED: Barrier timed out. ...`, which is all that jaxlib's client gives."""
        found = _CODE.match(str(error))
        if found is None:
            return None
        code, text = found.groups()
        if code == "DEADLINE_EXCEEDED":
            missing = tuple(sorted({self.process(task) for task in _missing_tasks(text)}))
            who = f", waiting for {_named(missing)}" if missing else ""
            return BarrierTimeout(f"{what} timed out after {timeout_s:g} s{who}: {text}", name=name, missing=missing)
        if code == "UNAVAILABLE":
            return CoordinatorLost(f"{what}: {text}")
        return CoordinationError(f"{what}: {text}", code=code)


class _Line:
    """Is the queue of this process at one name: its lock, the number of the last turn, and the first turn after the last failure."""

    __slots__ = ("epoch", "lock", "number")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = -1
        self.epoch = 0


def _missing_tasks(text: str) -> list[int]:
    found = _MISSING.search(text)
    return [int(number) for number in _TASK.findall(found.group(1))] if found else []


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


_channels: dict[int, GroupClient] = {}
_channels_lock = threading.Lock()


def channel_of(client: Any, tasks: Sequence[int] | None = None) -> GroupClient:
    """Returns the one channel of a client, so that all its users in this process share the turns. `tasks` counts on first use."""
    with _channels_lock:
        channel = _channels.get(id(client))
        if channel is None:
            channel = _channels[id(client)] = GroupClient(client, tasks)
        return channel


def forget_channel(client: Any) -> None:
    """Drops the channel of a client that was shut down."""
    with _channels_lock:
        _channels.pop(id(client), None)

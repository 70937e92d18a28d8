"""Group, the seam by which the rooms above reach other processes, and its implementations."""

from __future__ import annotations

import enum
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from holdfast.coordination import BarrierTimeout, CoordinationError

from ..job import clear_with_attempt as clear_with_attempt
from ..job import current_job
from ..job import settle_before_leaving as settle_before_leaving
from .group_client import Client, Deadline, bounded_name, group_client_of
from .runtime import current_client

_log = logging.getLogger(__name__)


class SaveStage(enum.IntEnum):
    """How far a process is with a save: `Group.report(save=, save_stage=)` says it of a number."""

    WRITING = 0
    REPORTED = 1  # its share is durable, and the commit no longer needs it
    COMMITTING = 2  # the primary alone
    SETTLED = 3  # committed or failed


@runtime_checkable
class Group(Protocol):
    """All that the rooms above need of the other processes.

    `index` is the rank among `count` processes, by runtime index. Thread-safe. Calls with different
    names never wait for each other; the nth call of a name in one process matches the nth in every
    other. Each call blocks for at most `timeout_s`, raises BarrierTimeout, ProcessLost or
    CoordinatorLost, and leaves no keys behind.
    """

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Waits until every process has called it."""

    def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
        """Sends a value of any size to rank 0, which gets all in rank order; others get None."""

    def broadcast(self, name: str, value: bytes | None, *, timeout_s: float) -> bytes:
        """Returns rank 0's value everywhere; rank 0 does not wait for the others to read it."""

    def report(self, **progress: Any) -> None:
        """Reports to the coordinator how far this process is. Never blocks for long, never raises.

        With `step=`, `saved_step=`, `save=` and `save_stage=`.
        """


class Solo:
    """The group of one process. Never blocks.

    `client` is that of a coordinator that hears its reports.
    """

    index = 0
    count = 1

    def __init__(self, client: Client | None = None) -> None:
        self._client = client

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Returns at once."""

    def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
        """Returns the one value."""
        return [value]

    def broadcast(self, name: str, value: bytes | None, *, timeout_s: float) -> bytes:
        """Returns the value."""
        if value is None:
            raise ValueError(f"broadcast {name!r}: rank 0 gives the value, found None")
        return value

    def report(self, **progress: Any) -> None:
        """Passes `progress` on to the coordinator, where there is one."""
        _report(self._client, progress)


class ClusterGroup:
    """A group over a coordination client: ours, jaxlib's, or any with jaxlib's method names.

    `processes` are the runtime indices of the members in rank order, as the attribute too (None: 0
    to count - 1, all of the job); `tasks[i]` is the task id of runtime process i (None: equal).
    Over jaxlib's client a dead process is found by timeout; over ours it is named within the
    heartbeat timeout.
    """

    def __init__(
        self,
        client: Client,
        index: int,
        count: int,
        *,
        processes: Sequence[int] | None = None,
        tasks: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= index < count or (processes is not None and len(processes) != count):
            raise ValueError(
                f"rank {index} of {count} processes {processes}: expected 0 <= rank < count, and a"
                " process for every rank"
            )
        self.index = index
        self.count = count
        self.processes = None if processes is None else list(processes)
        self._group_client = group_client_of(client, tasks)
        self._kind = "" if processes is None else "." + bounded_name("-".join(map(str, processes)))

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Waits until every process has called it."""
        deadline = Deadline(timeout_s)
        with self._group_client.call("barrier" + self._kind, name, deadline) as call:
            self._group_client.barrier(call, deadline, self.processes)

    def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
        """Sends `value` to rank 0: one key a sender, one barrier, one listing by rank 0.

        A value that was sent counts: rank 0 has all of them also when a process dies between
        sending and the end of the barrier.
        """
        deadline = Deadline(timeout_s)
        with self._group_client.call("gather" + self._kind, name, deadline) as call:
            own_key = f"{call.folder}/{self.index}"
            if self.index:
                self._group_client.set(own_key, value, deadline)
            try:
                self._group_client.barrier(call, deadline, self.processes)
            except CoordinationError as error:
                timed_out = isinstance(error, BarrierTimeout)
                if self.index:
                    # Without a timeout rank 0 may still count the value, and deletes it.
                    if timed_out:
                        _try(lambda: self._group_client.delete(own_key, deadline))
                    raise
                sent = {} if timed_out else self._group_client.list(call.folder)
                _try(lambda: self._group_client.delete(call.folder, deadline))
                if len(sent) < self.count - 1:
                    raise
                _log.warning("gather %r is complete, although %s", name, error)
            else:
                if self.index:
                    return None
                sent = self._group_client.list(call.folder)
                _try(lambda: self._group_client.delete(call.folder, deadline))
            return [value, *(sent[str(rank)] for rank in range(1, self.count))]

    def broadcast(self, name: str, value: bytes | None, *, timeout_s: float) -> bytes:
        """Returns rank 0's value. The last that reads it deletes it: rank 0 need not wait."""
        if (value is None) != bool(self.index):
            raise ValueError(
                f"broadcast {name!r}: rank 0 gives the value and the others None; this is rank"
                f" {self.index} with {type(value)}"
            )
        deadline = Deadline(timeout_s)
        source = self.processes[0] if self.processes else 0
        readers = self.count - 1
        with self._group_client.call("broadcast" + self._kind, name, deadline) as call:
            key = f"{call.folder}/value"
            if value is not None:
                if readers:
                    self._group_client.set(key, value, deadline)
                return value
            try:
                return self._group_client.get(key, name, deadline, source)
            finally:
                _try(lambda: self._group_client.delete_after(call.folder, readers, deadline))

    def report(self, **progress: Any) -> None:
        """Passes `progress` on to the coordinator, where the client can."""
        _report(self._group_client.client, progress)


def decide_at_first(
    group: Group,
    name: str,
    said: Any,
    decide: Callable[[list[Any]], Any],
    deadline: Deadline,
) -> Any:
    """Returns on all processes what rank 0 decides by what all say, in rank order.

    What is said and decided is of JSON's values.
    """
    gathered = group.gather(name, pack(said), timeout_s=deadline.remaining_s())
    decided = None if gathered is None else pack(decide([unpack(each) for each in gathered]))
    return unpack(group.broadcast(name, decided, timeout_s=deadline.remaining_s()))


def pack(value: Any) -> bytes:
    """Returns a value of JSON's, deflated."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def unpack(data: bytes) -> Any:
    """Returns the value that was packed."""
    return json.loads(zlib.decompress(data))


def runtime_indices(group: Group) -> Sequence[int]:
    """Returns the runtime indices of a group's members, in rank order."""
    processes: Sequence[int] | None = getattr(group, "processes", None)
    return range(group.count) if processes is None else processes


def _report(client: Client | None, progress: dict[str, Any]) -> None:
    """Reports through a client that can: jaxlib's cannot."""
    report = getattr(client, "report", None)
    if report is not None:
        _try(lambda: report(**progress))


def _try(operation: Callable[[], object]) -> None:
    """Runs what no result depends on: its failure is logged, never raised."""
    try:
        operation()
    except CoordinationError as error:
        _log.debug("%s", error)


def default_group() -> Group:
    """Returns the group of all processes: Solo for one, else over the job's client.

    That is `initialize()`'s, or jax.distributed's own.
    """
    if jax.process_count() == 1:
        return Solo(current_job().client)
    return ClusterGroup(current_client(), jax.process_index(), jax.process_count())


def close_with_attempt(close: Callable[[], None]) -> None:
    """Has a method called when this process leaves the attempt that it outlives, if its object is
    there.
    """
    current_job().at_end(close)


def given_or_default(group: Group | None) -> Group:
    """Returns the group, or the default where none is given. Raises TypeError for what is none."""
    if group is None:
        return default_group()
    if isinstance(group, type) or not isinstance(group, Group):
        raise TypeError(
            f"group: expected a holdfast.multihost.Group such as default_group(), found {group!r};"
            " leave it out for all processes of the job"
        )
    return group

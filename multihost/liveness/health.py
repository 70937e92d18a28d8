"""Who lives, for whoever computes: pushed lists of processes, and blocks that all end alike.

What this can and cannot end. Our own waits that involve a dead process end at once. A device
collective in flight ends where the backend can end it: on GPU, which aborts its communicators; on
CPU with `--xla_cpu_collective_timeout_seconds`, which `initialize()` sets; on TPU not.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import jax

from holdfast.coordination import BarrierTimeout, CoordinationError, ProcessLost

from ..group.barriers import coordination_timeout
from ..group.collectives import on_thread
from ..group.group_client import Deadline, GroupClient, bounded_name, lost
from ..group.runtime import current_group_client
from ..job import current_job

_log = logging.getLogger(__name__)

_LEFT = "it has left the job"


@dataclass(frozen=True)
class ProcessHealth:
    """One process by its runtime index: how it is, and in which of its lives.

    `state` is "UNINITIALIZED", "CONNECTED", "DISCONNECTED" or "ERROR", `error` says what happened,
    and `incarnation` differs for each life of a process.
    """

    process_id: int
    state: str
    incarnation: int
    error: str = ""
    host: str = ""


class HealthListener(Protocol):
    """Gets the list of processes, in the sense of PJRT's UpdateGlobalProcessInfo."""

    def update_global_process_info(self, infos: Sequence[ProcessHealth]) -> None:
        """Takes the complete list, in order of process numbers, at every change.

        A list is never older than the one before. Must not block for long.
        """


def failed_incarnations(
    old: Sequence[ProcessHealth], new: Sequence[ProcessHealth]
) -> dict[int, ProcessHealth]:
    """Returns the lives that ended between two complete lists, by process.

    They were connected, and now are not, or with another incarnation.
    """
    alive = {(info.process_id, info.incarnation) for info in new if info.state == "CONNECTED"}
    return {
        before.process_id: before
        for before in old
        if before.state == "CONNECTED" and (before.process_id, before.incarnation) not in alive
    }


class Health:
    """The list of processes, as the coordinator pushes it. Thread-safe.

    It refuses work with those that have failed. A process whose life ended stays refused, though it
    may be back with another incarnation, until this process has seen the new one in the answer of
    `live_processes()`: work planned with the old life cannot meet the new one.
    """

    def __init__(self, group_client: GroupClient) -> None:
        self.group_client = group_client
        self._lock = threading.RLock()
        self._infos: list[ProcessHealth] = []
        self._numbering = group_client.tasks
        self._translations: dict[int, tuple[Any, ProcessHealth]] = {}  # by task, from what
        self._failed: dict[int, ProcessHealth] = {}
        self._admitted: dict[int, int] = {}  # process: the incarnation last admitted
        self._listeners: list[HealthListener] = []
        self._version = 0
        group_client.refuse_by(self.require)
        watch = getattr(group_client.client, "watch_processes", None)
        self._stop: Callable[[], None] | None = watch(self._update) if watch else None

    def processes(self) -> list[ProcessHealth]:
        """Returns the complete list as last pushed; empty over jaxlib's own client."""
        with self._lock:
            return list(self._infos)

    def failed(self) -> dict[int, ProcessHealth]:
        """Returns the processes with which work is refused: the ended life of each, and why."""
        with self._lock:
            return dict(self._failed)

    def add_listener(self, listener: HealthListener) -> Callable[[], None]:
        """Gives `listener` the list now and at every change; returns a function that ends it.

        One list at a time, in order.
        """
        with self._lock:
            self._listeners.append(listener)
            if self._infos:
                listener.update_global_process_info(list(self._infos))

        def remove() -> None:
            with self._lock, suppress(ValueError):
                self._listeners.remove(listener)

        return remove

    def require(self, processes: Iterable[int] | None, name: str) -> None:
        """Raises ProcessLost when the life of one of `processes` (None: any) has ended.

        Asks nobody.
        """
        with self._lock:
            for process in list(self._failed) if processes is None else processes:
                if process in self._failed:
                    raise _lost(self._failed[process], name)

    def admit(self, incarnations: Mapping[int, int]) -> None:
        """Permits work with these lives from here on."""
        with self._lock:
            self._admitted.update(incarnations)
            for process, incarnation in incarnations.items():
                ended = self._failed.get(process)
                if ended is not None and ended.incarnation != incarnation:
                    del self._failed[process]

    def statistics(self) -> dict[str, Any]:
        """Returns how many lists came, how many listen, and which processes are refused."""
        with self._lock:
            return {
                "version": self._version,
                "listeners": len(self._listeners),
                "failed": sorted(self._failed),
            }

    def close(self) -> None:
        """Stops listening."""
        if self._stop is not None:
            self._stop()

    def _update(self, task_infos: Sequence[Any]) -> None:
        with self._lock:
            infos = self._translate(task_infos)
            self._note_ended(infos)
            self._infos = infos
            self._version += 1
            for listener in list(self._listeners):
                try:
                    listener.update_global_process_info(infos)
                except Exception:
                    _log.exception("a listener to the health of processes failed")
        # Once more, after the client's own call: a life that ended shows here, and not in a list in
        # which the process is back.
        self.group_client.note_change()

    def _note_ended(self, infos: Sequence[ProcessHealth]) -> None:
        # What has not changed is the same object: of thousands of processes, a few have.
        kept = set(map(id, infos)).intersection(map(id, self._infos))
        before = [info for info in self._infos if id(info) not in kept]
        changed = [info for info in infos if id(info) not in kept]
        now = {info.process_id: info for info in changed}
        for process, ended in failed_incarnations(before, changed).items():
            found = now.get(process)
            if found is not None and self._is_old_news(ended, found):
                continue
            why = _LEFT if found is None else found.error or "it was started again"
            host = ended.host or "unknown"
            self._failed[process] = replace(ended, state="ERROR", error=why)
            if why == _LEFT:
                _log.info("process %d (host %s) has left the job", process, host)
            else:
                _log.warning("process %d (host %s) is lost: %s", process, host, why)

    def _is_old_news(self, ended: ProcessHealth, found: ProcessHealth) -> bool:
        """Returns whether a life ended before one that is admitted, and lives.

        The answer of `live_processes()` may overtake the list in which the former life ends.
        """
        admitted = self._admitted.get(ended.process_id, ended.incarnation)
        if ended.incarnation == admitted:
            return False
        lives = found.state == "CONNECTED" and found.incarnation == admitted
        return lives or found.incarnation == ended.incarnation

    def _translate(self, task_infos: Sequence[Any]) -> list[ProcessHealth]:
        """Returns the complete list by runtime indices; an entry that has not changed stays."""
        known = self._translations
        self._translations = {}
        if self._numbering is not self.group_client.tasks:
            self._numbering = self.group_client.tasks
            known = {}
        for info in task_infos:
            before = known.get(info.process_id)
            same = before is not None and before[0] is info
            self._translations[info.process_id] = (
                before if before is not None and same else (info, self._translated(info))
            )
        infos = [health for _, health in self._translations.values()]
        return sorted(infos, key=lambda info: info.process_id)

    def _translated(self, info: Any) -> ProcessHealth:
        error = info.message or ("" if info.code == "OK" else info.code)
        if info.state == "DISCONNECTED" and not error:
            error = _LEFT
        return ProcessHealth(
            self.group_client.process(info.process_id),
            info.state,
            info.incarnation,
            error,
            info.host,
        )


def _lost(ended: ProcessHealth, name: str) -> ProcessLost:
    return lost(name, ended.process_id, ended.host, ended.error)


def health() -> Health:
    """Returns the health of this job's processes; over jaxlib's own client it knows nothing."""
    group_client = current_group_client()
    job = current_job()
    with job.lock:
        current = job.get(Health)
        if current is None or current.group_client is not group_client:
            if current is not None:
                current.close()
            current = Health(group_client)
            job.put(current)
        return current


def lost_tasks(group_client: GroupClient) -> list[int]:
    """Returns the task ids of a client's processes whose lives are known to have ended."""
    current = current_job().get(Health)
    if current is None or current.group_client is not group_client:
        return []
    return [group_client.task(process) for process in current.failed()]


def live_processes(
    processes: Collection[int] | None = None, *, timeout_s: float | None = None
) -> dict[int, int]:
    """Returns {process: incarnation} of those of `processes` (None: all) that live.

    Every one of them gets the same answer. A barrier over the living: each of them has to call it,
    with the same processes, this one among them. Blocks for at most `timeout_s` (default 300).
    Raises BarrierTimeout naming who has not called it, CoordinatorLost, ValueError. Source of the
    meaning: GetAliveTasks of XLA's coordination service.
    """
    timeout_s = coordination_timeout() if timeout_s is None else timeout_s
    members = sorted(range(jax.process_count()) if processes is None else set(processes))
    if jax.process_index() not in members:
        raise ValueError(
            f"live_processes of {members}: this is process {jax.process_index()}, which is not one"
            " of them"
        )
    if not 0 <= members[0] <= members[-1] < jax.process_count():
        raise ValueError(
            f"live_processes of {members}: the job has {jax.process_count()} processes, 0 to"
            f" {jax.process_count() - 1}"
        )
    if jax.process_count() == 1:
        return {0: 0}
    group_client = current_group_client()
    tasks = [group_client.task(process) for process in members]
    with group_client.errors("live_processes", "live_processes", timeout_s):
        answer = _live_tasks(group_client, tasks, timeout_s)
    living = {group_client.process(task): answer[task] for task in sorted(answer)}
    health().admit(living)
    return living


def _live_tasks(
    group_client: GroupClient, tasks: Sequence[int], timeout_s: float
) -> dict[int, int]:
    client: Any = group_client.client
    if group_client.pushes:
        answer: dict[int, int] = client.get_live_nodes(tasks, timeout_s=timeout_s)
        return answer
    # The call of jaxlib's own client has no timeout: it stays behind on its thread.
    asked = on_thread("live_processes", lambda: client.get_live_nodes(tasks))
    if not wait([asked], timeout_s).done:
        raise BarrierTimeout(
            f"live_processes did not end in {timeout_s:g} s: a living process has not called it",
            name="live_processes",
        )
    return dict(asked.result())


@dataclass(frozen=True)
class _Block:
    """A block of `live_devices`. `name` is the same in every process that began it, and no other
    block has it.
    """

    name: str
    members: Sequence[int]
    began: Mapping[int, int]  # process: incarnation

    @property
    def folder(self) -> str:
        """Where each process tells how the latest of its blocks ended."""
        return f"holdfast/live/{bounded_name('-'.join(map(str, self.members)))}"


@dataclass(frozen=True)
class _BlockEnd:
    """How a block ended in one process: `failure` is empty where it ended well."""

    block: str
    failure: str

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _BlockEnd:
        return cls(**json.loads(data))


def _begin_block(
    members: Sequence[int], began: Mapping[int, int], timeout_s: float | None
) -> _Block:
    group_client = current_group_client()
    deadline = Deadline(coordination_timeout() if timeout_s is None else timeout_s)
    # The number counts blocks since the latest start of one of them: all that a process knows that
    # was started again.
    lives = "-".join(f"{process}.{incarnation:x}" for process, incarnation in began.items())
    name = f"{'-'.join(map(str, members))}~{lives}"
    with group_client.call("block", name, deadline) as call:
        return _Block(call.folder, members, began)


@contextmanager
def live_devices(
    devices: Sequence[jax.Device] | None = None, *, timeout_s: float | None = None
) -> Iterator[list[jax.Device]]:
    """Runs a block on those of `devices` (None: all) whose processes live.

    It has one outcome on every survivor. On entry it asks afresh who lives (jax.live_devices
    answers with what it knew at the end of the block before), and gives the devices in order of
    their ids. On exit it asks again: either the block ended well in every process that began it, or
    every survivor raises: ProcessLost when one died or was started again, the block's own exception
    where it raised, and CoordinationError (ABORTED) naming the process elsewhere. A process that
    came to the exit without having ended this block has failed it, too. Every living process enters
    with the same devices, some of them its own. Each end blocks for at most `timeout_s` (default
    300).
    """
    devices = jax.devices() if devices is None else devices
    members = sorted({device.process_index for device in devices})
    began = live_processes(members, timeout_s=timeout_s)
    block = _begin_block(members, began, timeout_s) if jax.process_count() > 1 else None
    failure: Exception | None = None
    try:
        yield sorted(
            (device for device in devices if device.process_index in began),
            key=lambda device: device.id,
        )
    except Exception as error:
        failure = error
    if block is not None:
        _end_alike(block, failure, timeout_s)
    if failure is not None:
        raise failure


def _exchange_ends(
    block: _Block, failure: Exception | None, timeout_s: float | None
) -> tuple[dict[int, int], dict[int, str]]:
    """Returns who lives after the block, and how it failed in each process where it did."""
    group_client = current_group_client()
    own = _BlockEnd(block.name, f"{type(failure).__name__}: {failure}" if failure else "")
    # One key a process: who comes to the end of a block has read the ends of the one before.
    group_client.set(f"{block.folder}/{jax.process_index()}", own.to_bytes())
    now = live_processes(block.members, timeout_s=timeout_s)
    told = {
        int(key): _BlockEnd.from_bytes(end) for key, end in group_client.list(block.folder).items()
    }
    failures = {}
    for process in block.began:
        end = told.get(process)
        if end is None or end.block != block.name:
            failures[process] = "it did not come to the end of this block"
        elif end.failure:
            failures[process] = end.failure
    return now, failures


def _end_alike(block: _Block, failure: Exception | None, timeout_s: float | None) -> None:
    """Reports how the block ended here, waits for all that live, and raises what concerns all."""
    now, failures = _exchange_ends(block, failure, timeout_s)
    ended = sorted(
        process for process, incarnation in block.began.items() if now.get(process) != incarnation
    )
    if ended:
        # A start within the block may not have been pushed yet.
        unheard = ProcessHealth(
            ended[0], "ERROR", block.began[ended[0]], "it died during the block"
        )
        raise _lost(health().failed().get(ended[0], unheard), "live_devices") from failure
    if failures and failure is None:
        first = min(failures)
        raise CoordinationError(
            f"the block failed in process {first}: {failures[first]}", code="ABORTED"
        )

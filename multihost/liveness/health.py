"""Who lives, for whoever computes: pushed lists of processes, and blocks that all end alike.

What this can and cannot end. Our own waits that involve a dead process end at once. A device
collective in flight ends where the backend can end it: on GPU, which aborts its communicators; on
CPU with `--xla_cpu_collective_timeout_seconds`, which `initialize()` sets; on TPU not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from holdfast.coordination import BarrierTimeout, CoordinationError, ProcessLost

from ..group.barriers import coordination_timeout
from ..group.collectives import on_thread
from ..group.group_client import Deadline, GroupClient, lost
from ..group.runtime import current_group_client
from ..job import current_job

_log = logging.getLogger(__name__)


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
        self._failed: dict[int, ProcessHealth] = {}
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
        infos = sorted(
            (self._translated(info) for info in task_infos), key=lambda info: info.process_id
        )
        with self._lock:
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
        errors = {info.process_id: info.error or "it was started again" for info in infos}
        for process, ended in failed_incarnations(self._infos, infos).items():
            why = errors.get(process, "it left")
            self._failed[process] = replace(ended, state="ERROR", error=why)
            _log.warning("process %d (host %s) is lost: %s", process, ended.host or "unknown", why)

    def _translated(self, info: Any) -> ProcessHealth:
        error = info.message or ("" if info.code == "OK" else info.code)
        if info.state == "DISCONNECTED" and not error:
            error = "it has left the job"
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
    Raises BarrierTimeout, CoordinatorLost, ValueError. Source of the meaning: GetAliveTasks of
    XLA's coordination service.
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
    # On a thread, because the call has no timeout of its own.
    answer = on_thread("live_processes", lambda: _live(group_client, members))
    if not wait([answer], timeout_s).done:
        raise BarrierTimeout(
            f"live_processes did not end in {timeout_s:g} s: a living process has not called it",
            name="live_processes",
        )
    health().admit(answer.result())
    return answer.result()


def _live(group_client: GroupClient, members: Sequence[int]) -> dict[int, int]:
    client: Any = group_client.client
    with group_client.errors("live_processes", "live_processes"):
        answer = client.get_live_nodes([group_client.task(process) for process in members])
    return {group_client.process(task): incarnation for task, incarnation in sorted(answer.items())}


@contextmanager
def live_devices(
    devices: Sequence[jax.Device] | None = None, *, timeout_s: float | None = None
) -> Iterator[list[jax.Device]]:
    """Runs a block on those of `devices` (None: all) whose processes live.

    It has one outcome on every survivor. On entry it asks afresh who lives (jax.live_devices
    answers with what it knew at the end of the block before), and gives the devices in order of
    their ids. On exit it asks again: either the block ended well in every process that began it, or
    every survivor raises: ProcessLost when one died or was started again, the block's own exception
    where it raised, and CoordinationError (ABORTED) naming the process elsewhere. Every living
    process enters with the same devices, some of them its own. Each end blocks for at most
    `timeout_s` (default 300).
    """
    devices = jax.devices() if devices is None else devices
    members = sorted({device.process_index for device in devices})
    began = live_processes(members, timeout_s=timeout_s)
    failure: Exception | None = None
    try:
        yield sorted(
            (device for device in devices if device.process_index in began),
            key=lambda device: device.id,
        )
    except Exception as error:
        failure = error
    if jax.process_count() > 1:
        _end_alike(members, began, failure, timeout_s)
    if failure is not None:
        raise failure


def _exchange_outcomes(
    members: Sequence[int], outcome: str, timeout_s: float | None
) -> tuple[dict[int, int], dict[int, str]]:
    """Returns who lives after the block, and the outcome of each process that told one."""
    group_client = current_group_client()
    me = jax.process_index()
    deadline = Deadline(coordination_timeout() if timeout_s is None else timeout_s)
    with group_client.call("live", "-".join(map(str, members)), deadline) as call:
        group_client.set(f"{call.folder}/{me}", outcome.encode())
        now = live_processes(members, timeout_s=timeout_s)
        outcomes = {int(key): text.decode() for key, text in group_client.list(call.folder).items()}
        # All that are here have read the outcomes of the block before.
        if me == min(now) and call.number:
            group_client.delete(f"{call.key}/{call.number - 1}")
    return now, outcomes


def _end_alike(
    members: Sequence[int],
    began: Mapping[int, int],
    failure: Exception | None,
    timeout_s: float | None,
) -> None:
    """Reports how the block ended here, waits for all that live, and raises what concerns all."""
    outcome = f"{type(failure).__name__}: {failure}" if failure else ""
    now, outcomes = _exchange_outcomes(members, outcome, timeout_s)
    ended = sorted(
        process for process, incarnation in began.items() if now.get(process) != incarnation
    )
    if ended:
        # A start within the block may not have been pushed yet.
        unheard = ProcessHealth(ended[0], "ERROR", began[ended[0]], "it died during the block")
        raise _lost(health().failed().get(ended[0], unheard), "live_devices") from failure
    others = sorted(process for process, text in outcomes.items() if text and process in began)
    if others and failure is None:
        raise CoordinationError(
            f"the block failed in process {others[0]}: {outcomes[others[0]]}", code="ABORTED"
        )

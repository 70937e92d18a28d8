"""Who lives, for whoever computes: pushed lists of processes, failed incarnations, and blocks that
end alike on every survivor.

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
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from holdfast.coordination import BarrierTimeout, CoordinationError, ProcessLost

from ..group.barriers import coordination_timeout
from ..group.collectives import on_thread
from ..group.group_client import Deadline, GroupClient
from ..group.runtime import current_group_client

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessInfo:
    """One process by its runtime index: `state` is "UNINITIALIZED", "CONNECTED", "DISCONNECTED" or
    "ERROR"; `error` says what happened.

    `incarnation` differs for each life of a process.
    """

    process_id: int
    state: str
    incarnation: int
    error: str = ""
    host: str = ""


class HealthListener(Protocol):
    """Gets the list of processes, in the sense of PJRT's UpdateGlobalProcessInfo."""

    def update_global_process_info(self, infos: Sequence[ProcessInfo]) -> None:
        """Takes the complete list, in order of process numbers, at every change and never an older
        one. Must not block for long.
        """


def failed_incarnations(
    old: Sequence[ProcessInfo], new: Sequence[ProcessInfo]
) -> dict[int, ProcessInfo]:
    """Returns the lives that ended between two complete lists, by process: connected before, and
    now not, or with another incarnation.
    """
    now = {info.process_id: info for info in new}
    return {
        before.process_id: before
        for before in old
        if before.state == "CONNECTED"
        and (
            (after := now.get(before.process_id)) is None
            or (after.state, after.incarnation) != ("CONNECTED", before.incarnation)
        )
    }


class Health:
    """The list of processes, as the coordinator pushes it; refuses work with those that have
    failed. Thread-safe.

    A process whose life ended stays refused, though it may be back with another incarnation, until
    this process has seen the new one in the answer of `live_processes()`: work planned with the old
    life cannot meet the new one.
    """

    def __init__(self, group_client: GroupClient) -> None:
        self._group_client = group_client
        self._lock = threading.RLock()
        self._infos: list[ProcessInfo] = []
        self._failed: dict[int, ProcessInfo] = {}
        self._listeners: list[HealthListener] = []
        self._version = 0
        group_client.require = self.require
        watch = getattr(group_client.client, "watch_processes", None)
        self._stop: Callable[[], None] | None = watch(self._update) if watch else None

    def processes(self) -> list[ProcessInfo]:
        """Returns the complete list as last pushed; empty over jaxlib's own client, which pushes
        none.
        """
        with self._lock:
            return list(self._infos)

    def failed(self) -> dict[int, ProcessInfo]:
        """Returns the processes with which work is refused, with the life of each that ended and
        why.
        """
        with self._lock:
            return dict(self._failed)

    def add_listener(self, listener: HealthListener) -> Callable[[], None]:
        """Gives `listener` the list now and at every change; returns a function that ends it. One
        list at a time, in order.
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
        """Raises ProcessLost when the life of one of `processes` (None: of any) has ended. Asks
        nobody.
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
        """Returns how many lists came, how many listeners there are, and which processes are
        refused.
        """
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
            now = {info.process_id: info for info in infos}
            for process, ended in failed_incarnations(self._infos, infos).items():
                seen = now.get(process)
                why = (
                    seen.error
                    if seen is not None and seen.error
                    else "it was started again"
                    if seen is not None
                    else "it left"
                )
                self._failed[process] = ProcessInfo(
                    process, "ERROR", ended.incarnation, why, ended.host
                )
                _log.warning(
                    "process %d (host %s) is lost: %s", process, ended.host or "unknown", why
                )
            self._infos = infos
            self._version = self._version + 1
            for listener in list(self._listeners):
                try:
                    listener.update_global_process_info(infos)
                except Exception:
                    _log.exception("a listener to the health of processes failed")
        # a life that ended shows here, and not in a list in which the process is back
        self._group_client.note_change()

    def _translated(self, info: Any) -> ProcessInfo:
        error = info.message or ("" if info.code == "OK" else info.code)
        if info.state == "DISCONNECTED" and not error:
            error = "it has left the job"
        return ProcessInfo(
            self._group_client.process(info.process_id),
            info.state,
            info.incarnation,
            error,
            info.host,
        )


def _lost(ended: ProcessInfo, name: str) -> ProcessLost:
    host = ended.host or None
    return ProcessLost(
        f"{name!r} needs process {ended.process_id} (host {host or 'unknown'}), which is gone:"
        f" {ended.error}",
        process=ended.process_id,
        host=host,
    )


_current: Health | None = None
_current_lock = threading.Lock()


def health() -> Health:
    """Returns the health of this job's processes, over `initialize()`'s client; over jaxlib's own
    it knows nothing.
    """
    global _current
    group_client = current_group_client()
    with _current_lock:
        if _current is None or _current._group_client is not group_client:
            if _current is not None:
                _current.close()
            _current = Health(group_client)
        return _current


def lost_tasks(group_client: GroupClient) -> list[int]:
    """Returns the task ids of a client's processes whose lives have ended, as far as this process
    knows.
    """
    with _current_lock:
        current = _current
    if current is None or current._group_client is not group_client:
        return []
    return [group_client.task(process) for process in current.failed()]


def live_processes(
    processes: Collection[int] | None = None, *, timeout_s: float | None = None
) -> dict[int, int]:
    """Returns {process: incarnation} of those of `processes` (None: all) that live: the same answer
    to every one of them.

    A barrier over the living: each of them has to call it, with the same processes, this one among
    them. Blocks for at most `timeout_s` (default 300). Raises BarrierTimeout, CoordinatorLost,
    ValueError. Source of the meaning: GetAliveTasks of XLA's coordination service.
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
    answer = on_thread(
        "live_processes", lambda: _live(group_client, members)
    )  # the call has no timeout of its own
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
    """Runs a block on those of `devices` (None: all) whose processes live, with one outcome on
    every survivor.

    On entry it asks afresh who lives (jax.live_devices answers with what it knew at the end of the
    block before), and gives the devices in order of their ids. On exit it asks again: either the
    block ended well in every process that began it, or every survivor raises: ProcessLost when one
    died or was started again, the block's own exception where it raised, and CoordinationError
    (ABORTED) naming the process elsewhere. Every living process enters with the same devices, some
    of them its own. Each end blocks for at most `timeout_s` (default 300).
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


def _end_alike(
    members: Sequence[int],
    began: Mapping[int, int],
    failure: Exception | None,
    timeout_s: float | None,
) -> None:
    """Reports to the others how the block ended here, waits for all that live, and raises what
    concerns all.
    """
    group_client, me = current_group_client(), jax.process_index()
    deadline = Deadline(coordination_timeout() if timeout_s is None else timeout_s)
    with group_client.call("live", "-".join(map(str, members)), deadline) as call:
        group_client.set(
            f"{call.folder}/{me}",
            f"{type(failure).__name__}: {failure}".encode() if failure else b"",
        )
        now = live_processes(members, timeout_s=timeout_s)
        outcomes = {
            int(process): text.decode() for process, text in group_client.list(call.folder).items()
        }
        if me == min(now) and call.number:  # all have read the outcomes of the block before
            group_client.delete(f"{call.key}/{call.number - 1}")
    ended = sorted(
        process for process, incarnation in began.items() if now.get(process) != incarnation
    )
    if ended:
        known = (
            health()
            .failed()
            .get(
                ended[0],
                ProcessInfo(ended[0], "ERROR", began[ended[0]], "it died during the block"),
            )
        )
        raise _lost(known, "live_devices") from failure
    others = sorted(process for process, text in outcomes.items() if text and process in began)
    if others and failure is None:
        raise CoordinationError(
            f"the block failed in process {others[0]}: {outcomes[others[0]]}", code="ABORTED"
        )

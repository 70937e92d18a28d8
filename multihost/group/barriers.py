"""Barriers over all processes or some, by the coordination client: a timeout always holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Protocol

import jax

from ..job import current_job
from .group_client import Deadline, GroupClient, bounded_name
from .ids import is_runtime_to_distributed_ids_initialized, runtime_to_distributed_ids
from .runtime import current_group_client, process_index, use_experimental_distributed_process_id

_log = logging.getLogger(__name__)

SYNC_EVENT = "/jax/checkpoint/sync_global_devices_duration_sec"
_TIMEOUT_S = 300


def coordination_timeout() -> int:
    """Returns the seconds that a call waits for other processes unless it says how long."""
    return _TIMEOUT_S


def deadline_of(timeout_s: float | None) -> Deadline:
    """Returns the budget of a call that was given so many seconds, or none."""
    return Deadline(_TIMEOUT_S if timeout_s is None else timeout_s)


class BarrierSyncFn(Protocol):
    """A barrier as a function: blocks until the others have called it with the same `key`.

    Raises BarrierTimeout.
    """

    def __call__(self, *, key: str, timeout_ms: int) -> None: ...


def should_skip_process_sync(processes: Collection[int] | None = None) -> bool:
    """Returns whether there is nobody to wait for, because this process is alone or asks alone."""
    alone = processes is not None and len(processes) == 1 and process_index() in processes
    return alone or jax.process_count() == 1


def unique_barrier_key(key: str, *, prefix: str | None = None, suffix: str | None = None) -> str:
    """Returns `key` with `prefix_` before it and `.suffix` after it, where given."""
    return ("" if prefix is None else f"{prefix}_") + key + ("" if suffix is None else f".{suffix}")


def get_barrier_sync_fn(*, processes: Collection[int] | None = None) -> BarrierSyncFn:
    """Returns the barrier of all processes (None; none named too, as Orbax has it), or of those
    given by their numbers.

    It does nothing where there is nobody to wait for. The function is safe from several threads:
    different keys never wait for each other, one key may be used again. It raises BarrierTimeout
    naming who is missing, ProcessLost, CoordinatorLost. Raises ValueError when this process is not
    among `processes`, or the job does not have one of them.
    """
    if should_skip_process_sync(processes):
        return lambda *, key, timeout_ms: None
    if processes and process_index() not in processes:
        raise ValueError(
            f"barrier of processes {sorted(processes)}: this is process {process_index()}, which is"
            " not one of them"
        )
    group_client = current_group_client()
    members = _runtime_indices(processes) if processes else None
    return lambda *, key, timeout_ms: _wait(group_client, key, timeout_ms / 1000, members)


def sync_global_processes(
    name: str,
    *,
    timeout: float | None = None,
    processes: Collection[int] | None = None,
    barrier_sync_fn: BarrierSyncFn | None = None,
    record_event_name: str = SYNC_EVENT,
) -> None:
    """Waits until all processes (or those of `processes`) have called it with this name.

    It waits for at most `timeout` seconds (default 300; 0: now). A name may be used again: the nth
    call in one process meets the nth in the others. Safe from several threads, where different
    names never wait for each other. The seconds waited are recorded with jax.monitoring under
    `record_event_name`. Raises BarrierTimeout naming every process that is missing, ProcessLost,
    CoordinatorLost. Never runs a computation on the devices.
    """
    if should_skip_process_sync(processes):
        return
    start = time.monotonic()
    barrier = barrier_sync_fn or get_barrier_sync_fn(processes=processes)
    barrier(key=name, timeout_ms=max(1, int(deadline_of(timeout).timeout_s * 1000)))
    waited_s = time.monotonic() - start
    _log.debug("barrier %r: waited %.3f s", name, waited_s)
    jax.monitoring.record_event_duration_secs(record_event_name, waited_s)


def _wait(
    group_client: GroupClient, name: str, timeout_s: float, members: list[int] | None
) -> None:
    current_job().raise_if_over()
    deadline = Deadline(timeout_s)
    kind = "all" if members is None else f"some.{bounded_name('-'.join(map(str, members)))}"
    with group_client.call(kind, name, deadline) as call:
        group_client.barrier(call, deadline, members)


def _runtime_indices(processes: Collection[int]) -> list[int]:
    """Returns runtime indices, sorted. `processes` are distributed ids where Orbax's flag says."""
    count = jax.process_count()
    strangers = sorted(process for process in processes if not 0 <= process < count)
    if strangers:
        raise ValueError(
            f"there is no process {strangers[0]}: the job has {count}, 0 to {count - 1}; found"
            f" processes={sorted(processes)}"
        )
    if use_experimental_distributed_process_id() and is_runtime_to_distributed_ids_initialized():
        runtime = {task: index for index, task in enumerate(runtime_to_distributed_ids())}
        return sorted(runtime[process] for process in processes)
    return sorted(set(processes))

"""Which runtime index, distributed id and devices belong together.

On TPU the first two differ, because the runtime counts by topology.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..job import current_job
from .group import ClusterGroup, decide_at_first
from .group_client import Client, Deadline, group_client_of
from .runtime import current_client, distributed_process_id, use_experimental_distributed_process_id

_EXCHANGE_TIMEOUT_S = 300.0
Columns = dict[str, list[int]]


@dataclass(frozen=True)
class ProcessIds:
    """The numbers of one process: as jax counts, as the coordination service does, its devices."""

    runtime: int
    distributed: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class _IdMaps:
    """The part of a job that has both maps, once they are known."""

    runtime_to_distributed: list[int]
    distributed_to_devices: list[list[int]]


def local_ids() -> ProcessIds:
    """Reads this process's numbers from jax. Brings the backend up."""
    return ProcessIds(
        jax.process_index(),
        distributed_process_id(),
        tuple(device.id for device in jax.local_devices()),
    )


def exchange_ids(
    client: Client, mine: ProcessIds, num_processes: int, timeout_s: float = _EXCHANGE_TIMEOUT_S
) -> list[ProcessIds]:
    """Returns the numbers of all `num_processes` processes, in order of their distributed ids.

    Every process calls it; blocks for them. Raises BarrierTimeout or ProcessLost, and ValueError
    when two processes claim one number.
    """
    group = ClusterGroup(client, mine.distributed, num_processes)
    table = decide_at_first(group, "ids", columns_of([mine]), _joined, Deadline(timeout_s))
    ids = ids_in(table)
    for field in ("runtime", "distributed"):
        numbers = sorted(getattr(entry, field) for entry in ids)
        if numbers != list(range(num_processes)):
            raise ValueError(
                f"the {field} numbers of the processes are {numbers}, expected 0 to"
                f" {num_processes - 1}: two processes claim one number"
            )
    return ids


def _joined(tables: Iterable[Columns]) -> Columns:
    return columns_of([ids for table in tables for ids in ids_in(table)])


def columns_of(ids: Sequence[ProcessIds]) -> Columns:
    """Returns the numbers of all processes as they travel to each of them.

    Numbers mostly count on from their neighbours, so each column travels as its differences, which
    deflate to nearly nothing: the table of 16,384 processes is sent 16,384 times.
    """
    return {
        "runtime": _differences(entry.runtime for entry in ids),
        "distributed": _differences(entry.distributed for entry in ids),
        "device_counts": _differences(len(entry.devices) for entry in ids),
        "devices": _differences(device for entry in ids for device in entry.devices),
    }


def ids_in(table: Columns) -> list[ProcessIds]:
    """Returns the numbers of which `table` has the columns."""
    columns = {name: list(itertools.accumulate(differences)) for name, differences in table.items()}
    devices = iter(columns["devices"])
    return [
        ProcessIds(runtime, distributed, tuple(itertools.islice(devices, count)))
        for runtime, distributed, count in zip(
            columns["runtime"], columns["distributed"], columns["device_counts"], strict=True
        )
    ]


def _differences(numbers: Iterable[int]) -> list[int]:
    return [later - former for former, later in itertools.pairwise([0, *numbers])]


def initialize_ids(
    mine: ProcessIds | None = None,
    *,
    client: Client | None = None,
    timeout_s: float = _EXCHANGE_TIMEOUT_S,
) -> None:
    """Exchanges both maps at once. Every process calls it; does nothing when they are known.

    `mine` defaults to what jax says; a test gives numbers that differ.
    """
    job = current_job()
    if job.get(_IdMaps) is not None:
        return
    client = current_client() if client is None else client
    ids = exchange_ids(client, mine or local_ids(), jax.process_count(), timeout_s)
    by_runtime = sorted(ids, key=lambda entry: entry.runtime)
    maps = _IdMaps(
        [entry.distributed for entry in by_runtime], [list(entry.devices) for entry in ids]
    )
    job.put(maps)
    group_client_of(client).renumber(maps.runtime_to_distributed)


def forget_ids() -> None:
    """Drops the maps, as `shutdown()` does."""
    current_job().take(_IdMaps)


def initialize_runtime_to_distributed_ids() -> None:
    """Exchanges the map from runtime index to distributed id. Every process calls it.

    `initialize()` has done so already.
    """
    initialize_ids()


def initialize_distributed_to_device_ids() -> None:
    """Exchanges the map from distributed id to device ids. Every process calls it.

    `initialize()` has done so already.
    """
    initialize_ids()


def is_runtime_to_distributed_ids_initialized() -> bool:
    """Returns whether the map from runtime index to distributed id is known."""
    return current_job().get(_IdMaps) is not None


def is_distributed_to_device_ids_initialized() -> bool:
    """Returns whether the map from distributed id to device ids is known."""
    return current_job().get(_IdMaps) is not None


def runtime_to_distributed_ids() -> list[int]:
    """Returns the distributed ids in order of runtime index.

    Raises ValueError before they are known.
    """
    return _maps("distributed", "runtime_to_distributed").runtime_to_distributed


def runtime_to_distributed_process_id(pid: int) -> int:
    """Returns the distributed id of the process with runtime index `pid`.

    Raises ValueError before the map is known, and for no process.
    """
    ids = runtime_to_distributed_ids()
    if not 0 <= pid < len(ids):
        raise ValueError(f"there is no process {pid}: the job has {len(ids)}, 0 to {len(ids) - 1}")
    return ids[pid]


def distributed_to_device_ids() -> list[list[int]]:
    """Returns the device ids of every process in order of distributed id.

    Raises ValueError before they are known.
    """
    return _maps("device", "distributed_to_device").distributed_to_devices


def _maps(what: str, function: str) -> _IdMaps:
    maps = current_job().get(_IdMaps)
    if maps is None:
        raise ValueError(
            f"the {what} ids are not known yet: call initialize_{function}_ids() in every process"
        )
    return maps


def process_index_from_device(device: jax.Device) -> int:
    """Returns the number of the process of a device, counted as `process_index()` counts."""
    if use_experimental_distributed_process_id():
        return runtime_to_distributed_process_id(device.process_index)
    return int(device.process_index)


def unique_processes_from_devices(
    device_array: np.ndarray[Any, Any] | Sequence[jax.Device],
) -> set[int]:
    """Returns the numbers of the processes that the devices of an array of any shape belong to."""
    return {process_index_from_device(device) for device in np.asarray(device_array).flat}

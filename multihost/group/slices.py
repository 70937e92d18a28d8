"""Slices and replicas: which devices hold one copy of the model, and who speaks for them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .ids import unique_processes_from_devices
from .runtime import current_spec
from .runtime import process_index as own_process_index

Devices = np.ndarray[Any, Any]


def slice_count() -> int:
    """Returns the number of slices that the devices name.

    On CPU, where they name none, it is the launcher's number.
    """
    spec = current_spec()
    if spec is not None and jax.default_backend() == "cpu":
        return spec.num_slices
    slices = {device.slice_index for device in jax.devices() if hasattr(device, "slice_index")}
    return len(slices) or 1


def replica_count(global_mesh: jax.sharding.Mesh, *, replica_axis_index: int = 0) -> int:
    """Returns the size of the mesh's replica axis; a mesh of one axis is one replica."""
    if global_mesh.devices.ndim == 1:
        return 1
    return int(global_mesh.devices.shape[replica_axis_index])


def replica_devices(
    global_mesh: jax.sharding.Mesh, *, replica_id: int = 0, replica_axis_index: int = 0
) -> Devices:
    """Returns the devices of one replica: the mesh's array there, without the replica axis."""
    return np.asarray(np.take(global_mesh.devices, replica_id, axis=replica_axis_index))


def in_replica(
    process_index: int,
    global_mesh: jax.sharding.Mesh,
    *,
    replica_id: int = 0,
    replica_axis_index: int = 0,
) -> bool:
    """Returns whether a process has devices in a replica."""
    devices = replica_devices(
        global_mesh, replica_id=replica_id, replica_axis_index=replica_axis_index
    )
    return process_index in unique_processes_from_devices(devices)


def process_replica_id(
    process_index: int, global_mesh: jax.sharding.Mesh, *, replica_axis_index: int = 0
) -> int:
    """Returns the first replica that a process has devices in, -1 where there is none."""
    for replica_id in range(replica_count(global_mesh, replica_axis_index=replica_axis_index)):
        if in_replica(
            process_index, global_mesh, replica_id=replica_id, replica_axis_index=replica_axis_index
        ):
            return replica_id
    return -1


def local_replica_devices(
    global_mesh: jax.sharding.Mesh, *, replica_axis_index: int = 0
) -> Devices:
    """Returns the devices of this process's replica.

    Raises ValueError when this process has no device in the mesh.
    """
    process = own_process_index()
    replica_id = process_replica_id(process, global_mesh, replica_axis_index=replica_axis_index)
    if replica_id < 0:
        raise ValueError(f"process {process} has no device in the mesh {global_mesh.shape}")
    return replica_devices(
        global_mesh, replica_id=replica_id, replica_axis_index=replica_axis_index
    )


def primary_process_in_replica(
    global_mesh: jax.sharding.Mesh, *, replica_id: int = 0, replica_axis_index: int = 0
) -> int:
    """Returns the process that speaks for a replica: the lowest that has devices in it."""
    devices = replica_devices(
        global_mesh, replica_id=replica_id, replica_axis_index=replica_axis_index
    )
    return min(unique_processes_from_devices(devices))

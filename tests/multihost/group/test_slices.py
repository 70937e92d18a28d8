"""Slices and replicas of a mesh."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast.multihost as multihost


class Device:
    """Stands for a device of another process, which one process of a test cannot have."""

    def __init__(self, number: int, process_index: int, slice_index: int) -> None:
        self.id = number
        self.process_index = process_index
        self.slice_index = slice_index


class Mesh:
    """What these helpers read of a jax.sharding.Mesh: its array of devices and its shape."""

    def __init__(self, devices: np.ndarray) -> None:
        self.devices = devices
        self.shape = dict(enumerate(devices.shape))


# Two slices of two processes with two devices each.
DEVICES = np.array([Device(number, number // 2, number // 4) for number in range(8)], dtype=object)
MESH = Mesh(DEVICES.reshape(2, 4))


def test_replicas_of_a_mesh() -> None:
    """Each row of the replica axis is one replica, with its devices, processes and the lowest of
    them as its primary.
    """
    assert multihost.replica_count(MESH) == 2
    assert multihost.replica_count(MESH, replica_axis_index=1) == 4
    assert multihost.replica_count(Mesh(DEVICES)) == 1
    assert [device.id for device in multihost.replica_devices(MESH, replica_id=1).flat] == [
        4,
        5,
        6,
        7,
    ]
    assert [
        device.id
        for device in multihost.replica_devices(MESH, replica_id=1, replica_axis_index=1).flat
    ] == [1, 5]
    assert [multihost.process_replica_id(process, MESH) for process in range(5)] == [0, 0, 1, 1, -1]
    assert [
        multihost.primary_process_in_replica(MESH, replica_id=replica) for replica in range(2)
    ] == [0, 2]
    assert multihost.in_replica(3, MESH, replica_id=1)
    assert not multihost.in_replica(3, MESH)


def test_the_replica_of_this_process() -> None:
    """This process (0) finds its replica's devices, and gets an error when it has none in the
    mesh.
    """
    assert [device.id for device in multihost.local_replica_devices(MESH).flat] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="process 0 has no device in the mesh"):
        multihost.local_replica_devices(Mesh(DEVICES[4:].reshape(1, 4)))


def test_one_process_is_one_slice() -> None:
    """Where neither devices nor a launcher name slices there is one."""
    assert multihost.slice_count() == 1

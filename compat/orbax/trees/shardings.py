"""Shardings: made for arrays of which only the shapes are known, and described in metadata."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np


def construct_maximal_shardings(
    abstract_state: Any, devices: Sequence[jax.Device] | None = None
) -> Any:
    """Returns a sharding for each array, by which as many devices as its axes allow have a part.

    The longest axes are divided first. An array whose axes are all shorter than the number of
    devices is whole on each of them.
    """
    chosen = np.asarray(jax.devices() if devices is None else devices)
    return jax.tree.map(lambda leaf: _maximal_sharding(leaf.shape, chosen), abstract_state)


def _maximal_sharding(shape: tuple[int, ...], devices: np.ndarray) -> jax.sharding.Sharding:
    if max(shape, default=0) < jax.device_count():
        return _sharding(devices, [devices.size], [])
    spec: list[str | None] = [None] * len(shape)
    parts: list[int] = []
    left = devices.size
    for axis in np.argsort(shape)[::-1]:
        share = math.gcd(shape[axis], left)
        if shape[axis] < left or share == 1:
            continue
        spec[axis] = string.ascii_letters[len(parts)]
        parts.append(share)
        left //= share
    if left > 1:
        parts.append(left)  # the devices along this axis of the mesh have the same
    return _sharding(devices, parts, spec)


def _sharding(
    devices: np.ndarray, mesh_shape: Sequence[int], spec: Sequence[str | None]
) -> jax.sharding.Sharding:
    names = tuple(string.ascii_letters[: len(mesh_shape)])
    mesh = jax.sharding.Mesh(devices.reshape(mesh_shape), names)
    parts: Any = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(mesh, parts(*spec))


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Returns an array of all devices, each with the values that this process has.

    Every process calls it, with equal values.
    """
    local = arr.addressable_data(0)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    spec: Any = jax.sharding.PartitionSpec
    sharding = jax.sharding.NamedSharding(mesh, spec(*[None][: local.ndim]))
    parts = [jax.device_put(local, device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(local.shape, sharding, parts)


@dataclass
class DeviceMetadata:
    """A device."""

    id: int


@dataclass
class DeviceMetadataMesh:
    """The devices of a mesh, in nested lists."""

    mesh: Any

    def to_jax_device_mesh(self) -> Any:
        """Returns the devices of this job. Raises ValueError where it lacks one."""
        there = {device.id: device for device in jax.devices()}

        def device_of(about: DeviceMetadata) -> jax.Device:
            if about.id not in there:
                raise ValueError(
                    f"the array was saved on the device {about.id}, and this job has"
                    f" {sorted(there)}; give a sharding on these"
                )
            return there[about.id]

        return jax.tree.map(device_of, self.mesh)


@dataclass
class ShardingMetadata:
    """How an array was sharded, as metadata of checkpoints has it."""

    # What it was made of: it knows the kind of memory too.
    _sharding: Any = field(default=None, repr=False, compare=False, kw_only=True)

    def to_jax_sharding(self) -> Any:
        """Returns the sharding, on this job's devices. Raises ValueError where it lacks one."""
        return self._made() if self._sharding is None else self._sharding

    def _made(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.to_jax_sharding")


@dataclass
class NamedShardingMetadata(ShardingMetadata):
    """A sharding over the axes of a mesh. Without a `device_mesh` it is of all devices."""

    shape: Any
    axis_names: list[str]
    partition_spec: tuple[Any, ...]
    axis_types: Any = None
    device_mesh: DeviceMetadataMesh | None = None

    def __post_init__(self) -> None:
        self.shape = np.asarray(self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedShardingMetadata):
            return NotImplemented
        names = ("axis_names", "partition_spec", "axis_types", "device_mesh")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and np.array_equal(self.shape, other.shape)

    @classmethod
    def from_jax_sharding(cls, jax_sharding: Any) -> Self:
        """Returns the description of a NamedSharding."""
        mesh = jax_sharding.mesh
        devices = jax.tree.map(lambda device: DeviceMetadata(device.id), mesh.devices.tolist())
        return cls(
            shape=list(mesh.shape.values()),
            axis_names=list(mesh.axis_names),
            partition_spec=tuple(jax_sharding.spec),
            axis_types=tuple(mesh.axis_types),
            device_mesh=DeviceMetadataMesh(devices),
            _sharding=jax_sharding,
        )

    def _made(self) -> Any:
        saved_on = self.device_mesh
        chosen = jax.devices() if saved_on is None else saved_on.to_jax_device_mesh()
        devices = np.asarray(chosen).reshape(self.shape)
        mesh = jax.sharding.Mesh(devices, tuple(self.axis_names), axis_types=self.axis_types)
        parts: Any = jax.sharding.PartitionSpec
        return jax.sharding.NamedSharding(mesh, parts(*self.partition_spec))


@dataclass
class SingleDeviceShardingMetadata(ShardingMetadata):
    """The sharding of an array on one device, which is called by its text."""

    device_str: str

    @classmethod
    def from_jax_sharding(cls, jax_sharding: Any) -> Self:
        """Returns the description of a SingleDeviceSharding."""
        return cls(str(next(iter(jax_sharding.device_set))), _sharding=jax_sharding)

    def _made(self) -> Any:
        there = {str(device): device for device in jax.local_devices()}
        if self.device_str not in there:
            raise ValueError(
                f"the array was saved on {self.device_str}, and this process has"
                f" {sorted(there)}; give a sharding on these"
            )
        return jax.sharding.SingleDeviceSharding(there[self.device_str])


def describe_sharding(jax_sharding: Any) -> ShardingMetadata | None:
    """Returns the description of a sharding of jax's; None for None, and for other kinds."""
    if isinstance(jax_sharding, jax.sharding.NamedSharding):
        return NamedShardingMetadata.from_jax_sharding(jax_sharding)
    if isinstance(jax_sharding, jax.sharding.SingleDeviceSharding):
        return SingleDeviceShardingMetadata.from_jax_sharding(jax_sharding)
    return None


def sharding_of(given: Any) -> Any:
    """Returns a sharding of jax's: as it was given, or as metadata describes it."""
    return given.to_jax_sharding() if isinstance(given, ShardingMetadata) else given

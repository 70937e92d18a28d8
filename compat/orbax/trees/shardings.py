"""`orbax.checkpoint.arrays`: shardings for arrays of which only the shapes are known."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

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

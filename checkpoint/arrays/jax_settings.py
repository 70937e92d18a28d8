"""Settings of jax: those under which holdfast copies and casts, and those that it takes over from
its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .dtypes import Dtype
from .sharding import chosen_memory_kind, has_text_axes


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Runs a block without those settings that find mistakes in the caller's own computations.

    Whoever calls `save` or `restore` wants their transfers, and NaNs are data there. What says
    where and as what arrays are made stays the caller's: `set_mesh`, `default_device`,
    `enable_x64`. In every thread, since each setting may be the whole process's.
    """
    with (
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


@contextlib.contextmanager
def outside_of_meshes() -> Iterator[None]:
    """Runs a block of computations that no setting of the caller's touches: they run where their
    arrays are, and 64 bits stay 64.
    """
    with own_settings(), jax.set_mesh(None), jax.enable_x64(True):
        yield


def callers_settings() -> Callable[[], AbstractContextManager[None]]:
    """Returns what gives a block, on another thread, those settings of this one that say where and
    as what arrays are made.
    """
    mesh: Mesh = jax.sharding.get_mesh()
    config: Any = jax.config  # its settings have no types
    x64 = config.jax_enable_x64
    device = config.jax_default_device

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with (
            jax.set_mesh(None if mesh.empty else mesh),
            jax.enable_x64(x64),
            jax.default_device(device),
        ):
            yield

    return settings


def cast_array(array: Any, dtype: Dtype) -> Any:
    """Returns an array of numpy's or jax's in another dtype; jax's on its own devices, and in the
    memory where it is.
    """
    if not isinstance(array, jax.Array):
        return array.astype(dtype)
    with outside_of_meshes():
        shards = [shard.data for shard in array.addressable_shards]
        if chosen_memory_kind(array.sharding) is not None:
            # Programs read their devices' default memory alone, which may be too small for these.
            parts = [
                jax.device_put(np.asarray(shard).astype(dtype), shard.sharding) for shard in shards
            ]
        elif has_text_axes(array.sharding):
            return array.astype(dtype)
        else:  # jax compiles nothing for such a mesh
            parts = [shard.astype(dtype) for shard in shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

"""Settings of jax under which a caller may save and restore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from .places import meshes

CONTEXTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "transfer_guard, explicit": lambda: jax.transfer_guard("disallow_explicit"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "enable_x64": lambda: jax.enable_x64(True),
    "default_device": lambda: jax.default_device(jax.devices()[5]),
    "disable_jit": lambda: jax.disable_jit(True),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
} | {
    f"set_mesh {number}": (lambda mesh=mesh: jax.set_mesh(mesh))
    for number, mesh in enumerate(meshes())
}

"""Arrays whose computation fails after it was begun, as one of a device that runs behind does."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch


def _fail(_: Any) -> Any:
    raise RuntimeError("the reward model is down")


def failed_array(shape: tuple[int, ...] = ()) -> jax.Array:
    """Returns an array that is not there yet, and never will be."""
    square = jax.jit(lambda matrix: jnp.sin(matrix @ matrix))
    call = jax.jit(
        lambda row: jax.pure_callback(_fail, jax.ShapeDtypeStruct(shape, jnp.float32), row)
    )
    # A callback fails at its call unless it has to wait for what it is called with: longer, where
    # the machine kept this thread from calling it in time.
    matrix = jnp.ones((1500, 1500))
    for attempt in range(1, 9):
        for _ in range(2 * attempt):
            matrix = square(matrix)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            array: jax.Array = call(matrix[0, :2])
            return array
    raise AssertionError("the computations were done before the callback was called, each time")


def forget_failures() -> None:
    """Has jax forget the computations that failed, of which it would tell when the process ends."""
    tokens: Any = dispatch.runtime_tokens
    tokens.clear()

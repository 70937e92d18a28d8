"""Casts at save: floating-point arrays of a tree in another precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.jax_settings import cast_array
from ..arrays.ranges import OutOfRange, converted
from ..errors import leaf_at
from ..format.limits import shown
from ..format.tree import FlatTree

SaveDtype: TypeAlias = Any | Callable[[str], Any] | None


def cast_tree(tree: FlatTree, dtype: SaveDtype) -> FlatTree:
    """Returns the tree with its floating-point arrays as `dtype`, or as `dtype(path)` says.

    For None an array stays as it is; all else stays too. Arrays of jax are cast on their devices,
    where the copies take room until the snapshot is taken, whatever mesh is set and whatever jax is
    to find mistakes by; what the dtype cannot hold is inf or nan there. Raises ValueError for a
    dtype that is none of floating point, or that cannot hold a number of an array of numpy's.
    """
    if dtype is None:
        return tree
    chosen = (lambda path: dtype) if isinstance(dtype, type | np.dtype | str) else dtype
    if not callable(chosen):
        raise TypeError(
            f"save: dtype={shown(dtype)}: expected a floating-point dtype, as jnp.bfloat16, or a"
            " function that says one of a leaf's path"
        )
    return tree.with_leaves(
        [_cast(leaf, path, chosen) for leaf, path in zip(tree.leaves, tree.paths, strict=True)]
    )


def _cast(leaf: Any, path: str, chosen: Callable[[str], Any]) -> Any:
    if not hasattr(leaf, "astype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    wanted = chosen(path)
    if wanted is None:
        return leaf
    dtype = _floating(wanted, path)
    if leaf.dtype == dtype or is_refused(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return cast_array(leaf, dtype)
    try:
        return converted(leaf, dtype)
    except OutOfRange as error:
        raise ValueError(f"save: dtype={wanted!r} for {leaf_at(path)}: {error}") from None


def _floating(wanted: Any, path: str) -> Any:
    """Returns the dtype that is wanted for a leaf; raises ValueError where it is none."""
    try:
        dtype = jnp.dtype(wanted)
    except TypeError:
        dtype = np.dtype(object)
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype
    raise ValueError(
        f"save: dtype={wanted!r} for {leaf_at(path)}: expected a floating-point dtype, as"
        " jnp.bfloat16, or None"
    )


def is_refused(leaf: Any) -> bool:
    """Says whether an array is one of those that the planner refuses, by its path."""
    return isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, jax.Array) and leaf.is_deleted())

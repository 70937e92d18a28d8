"""The dtypes in which a context saves arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from holdfast.checkpoint.arrays.jax_settings import cast_array

from .options import Context


def cast_to_store(tree: Any, context: Context) -> Any:
    """Returns a tree whose arrays have the dtypes that the storage options of a context ask for.

    Those of a leaf count before those of all.
    """
    saving = context.options["array_options"].saving
    of_leaf = saving.scoped_storage_options_creator
    if of_leaf is None and _dtype_of(saving.storage_options) is None:
        return tree

    def cast(keypath: Any, leaf: Any) -> Any:
        own = None if of_leaf is None else _dtype_of(of_leaf(keypath, leaf))
        dtype = _dtype_of(saving.storage_options) if own is None else own
        return leaf if dtype is None or not _is_array(leaf) else cast_array(leaf, np.dtype(dtype))

    return jax.tree_util.tree_map_with_path(cast, tree)


def _dtype_of(options: Any) -> Any:
    return None if options is None else options.dtype


def _is_array(leaf: Any) -> bool:
    """Says whether a leaf is an array of numbers."""
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)

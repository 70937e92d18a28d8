"""One small tree, and how it is written in each layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.checkpoint import save
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert

LAYOUTS = ("holdfast", "orbax", "safetensors")

TREE = {
    "a": {"w": np.arange(60, dtype=np.float32).reshape(5, 12), "b": np.arange(4, dtype=np.int8)},
    "c": np.float16(2.5),
}


def write(layout: str, root: str) -> str:
    """Writes TREE as step 7 of a root (safetensors: as the folder `7` of it); returns where it
    is.
    """
    save(f"{root}/original", jax.tree.map(jnp.asarray, TREE), step=7)
    target = StorePath(open_storage(root), "7" if layout == "safetensors" else "")
    return convert(open_checkpoint(f"{root}/original"), target, layout)

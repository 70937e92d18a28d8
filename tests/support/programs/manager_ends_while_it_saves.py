"""Ends, or dies of an exception, right after it has begun a save."""

import sys

import jax.numpy as jnp

from holdfast.checkpoint import CheckpointManager

manager = CheckpointManager(sys.argv[1])
manager.save(7, {f"w{i}": jnp.full(1 << 20, 7.0) for i in range(8)})
if sys.argv[2] == "raise":
    raise KeyError("mine")

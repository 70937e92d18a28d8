"""Three saves as one of a job's processes, or alone, with what is printed to each stream."""

import os
import sys

import jax.numpy as jnp

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager

multihost.initialize()
for stream in (1, 2):
    os.write(stream, b"what a library in C++ prints\n")
with CheckpointManager(sys.argv[1]) as manager:
    for step in range(3):
        manager.save(step, {"w": jnp.arange(8.0)}, metrics={"loss": 1.0})
        os.write(2, b"what a library in C++ prints\n")
assert manager.latest_step() == 2

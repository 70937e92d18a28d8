"""Saves at the memory that the process has: see tests/checkpoint/storage/test_threads.py."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from holdfast.checkpoint import CheckpointError, CheckpointManager

state = {f"w{number}": np.random.default_rng(number).random(1 << 18) for number in range(8)}
jnp.ones(1).block_until_ready()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
saved = [1]
with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
    manager.save(1, state).wait()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    for step in (2, 3):
        try:
            manager.save(step, state).wait()
            saved.append(step)
        except (CheckpointError, MemoryError) as error:
            print(f"step {step}: {error!r}")
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    manager.save(4, state).wait()
    assert manager.all_steps() == [*saved, 4], (saved, manager.all_steps())

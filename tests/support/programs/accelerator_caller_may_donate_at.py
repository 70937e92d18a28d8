"""Runs in the processes of tests/system/test_accelerator.py."""

from __future__ import annotations

import jax
from accelerator_start import root, same, tree

from holdfast.checkpoint import CheckpointManager

state = tree(256)
want = tree(256)
step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
with CheckpointManager(root) as manager:
    manager.save(1, state)
    state = step(state)
    manager.wait_until_finished()
    same(manager.restore(1, like=want), want)

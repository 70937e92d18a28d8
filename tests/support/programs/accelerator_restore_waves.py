"""Runs in the processes of tests/system/test_accelerator.py."""

from __future__ import annotations

from accelerator_start import SHARE, root, same, tree

from holdfast.checkpoint import CheckpointManager, Options

state = tree(1024)
with CheckpointManager(root, options=Options(host_memory_bytes=(64 << 20) // SHARE)) as manager:
    manager.save(1, state)
    manager.wait_until_finished()
    same(manager.restore(1, like=state), state)

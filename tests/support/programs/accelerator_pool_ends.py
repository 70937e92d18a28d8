"""Saves more than the pool of pinned memory holds, with a bound that is known or without one."""

from __future__ import annotations

import os

from accelerator_start import root, same, tree

from holdfast.checkpoint import CheckpointManager, Options, verify

bound = os.environ["TEST_HOST_MEMORY_GB"]
options = Options(host_memory_bytes=int(bound) << 30) if bound else Options()
state = tree(2048)
with CheckpointManager(root, options=options) as manager:
    manager.save(1, state, overwrite=True)
    manager.wait_until_finished()
    same(manager.restore(1, like=state), state)
verify(root)

"""Runs in the processes of tests/system/test_accelerator.py."""

from __future__ import annotations

import time

from accelerator_start import root, same, tree

from holdfast.checkpoint import CheckpointManager, Options

base = tree(1024)
with CheckpointManager(root, options=Options(incremental=True)) as manager:
    for step in range(4):
        began = time.perf_counter()
        manager.save(step, {"base": base, "moving": tree(4, step)})
        manager.wait_until_finished()
        print(f"save {step}: {time.perf_counter() - began:.3f} s")
    found = manager.statistics()
    assert found["save_linked_bytes"] == 3 * sum(leaf.nbytes for leaf in base.values()), found
    same(manager.restore(3, like={"base": base, "moving": tree(4)})["base"], base)

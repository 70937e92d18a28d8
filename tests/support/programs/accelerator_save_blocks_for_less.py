"""Runs in the processes of tests/system/test_accelerator.py."""

from __future__ import annotations

import time

import jax
from accelerator_start import device, root, same, tree
from jax.sharding import SingleDeviceSharding

from holdfast.checkpoint import CheckpointManager

state = tree(1024)
pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
jax.block_until_ready(jax.device_put(state, pinned))  # the pool is there
began = time.perf_counter()
jax.block_until_ready(jax.device_put(state, pinned))
bare = time.perf_counter() - began
with CheckpointManager(root) as manager:
    for step in range(3):
        began = time.perf_counter()
        manager.save(step, state)
        blocked = time.perf_counter() - began
        manager.wait_until_finished()
        whole = time.perf_counter() - began
    print(f"blocked {blocked * 1e3:.1f} ms; durable {whole:.2f} s")
    gib = sum(leaf.nbytes for leaf in state.values()) / 2**30
    print(f"a bare copy to the host {bare * 1e3:.1f} ms, {gib / bare:.1f} GiB/s")
    began = time.perf_counter()
    got = jax.block_until_ready(manager.restore(2, like=state))
    print(f"restored into device memory in {time.perf_counter() - began:.2f} s")
    same(got, state)

"""What only an accelerator can show: copies to the host, pinned memory that ends, restores into
device memory, collectives.

`make accelerator` runs these where jax finds a GPU or a TPU, and prints their figures; elsewhere
they skip. Each runs in a process of its own, which alone sees the device.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.paths import ROOT

START = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from holdfast.checkpoint import CheckpointManager, Options, verify
root, device = sys.argv[1], jax.devices()[0]

def tree(mib, seed=0):
    make = jax.jit(lambda n: jnp.full((4 << 18,), n, jnp.float32))
    return jax.block_until_ready({f"l{i}": make(i + seed) for i in range(mib // 4)})

def same(got, want):
    assert set(got) == set(want)
    assert all(bool((got[name] == want[name]).all()) for name in want)
"""


@functools.cache
def platform() -> str:
    """Returns what jax finds on this machine, asked in another process."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return (
        done.stdout.strip().splitlines()[-1]
        if done.returncode == 0 and done.stdout.strip()
        else "none"
    )


@pytest.fixture(autouse=True)
def accelerator() -> None:
    if platform() not in ("gpu", "tpu"):
        pytest.skip(f"jax finds no accelerator here: {platform()}")


def run(script: str, root: Path, **environment: str) -> str:
    """Runs a script on the accelerator; returns what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", START + textwrap.dedent(script), str(root)]
    done = subprocess.run(
        command,
        env=inherited | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    print(done.stdout)
    return done.stdout


@pytest.mark.timeout(300)
def test_a_save_blocks_for_less_than_the_copy(tmp_path: Path) -> None:
    """1 GiB: how long `save` blocks, how fast a bare copy to pinned memory is, and what the save
    takes; restored bit-exact.
    """
    run(
        """
        from jax.sharding import SingleDeviceSharding
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
            print(f"a bare copy to the host {bare * 1e3:.1f} ms, {1 / bare:.1f} GiB/s")
            began = time.perf_counter()
            got = jax.block_until_ready(manager.restore(2, like=state))
            print(f"restored into device memory in {time.perf_counter() - began:.2f} s")
            same(got, state)
        """,
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_the_caller_may_donate_at_once(tmp_path: Path) -> None:
    """What the next step does to the same buffers is not in the checkpoint."""
    run(
        """
        state, want = tree(256), tree(256)
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
        with CheckpointManager(root) as manager:
            manager.save(1, state)
            state = step(state)
            manager.wait_until_finished()
            same(manager.restore(1, like=want), want)
        """,
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_a_pool_of_pinned_memory_that_ends(tmp_path: Path) -> None:
    """A gigabyte of pinned memory and two of state: the rest waits on the device, whether the bound
    is known or has to be run into.
    """
    for more in ("", ", options=Options(host_memory_bytes=8 << 30)"):
        run(
            f"""
            state = tree(2048)
            with CheckpointManager(root{more}) as manager:
                manager.save(1, state, overwrite=True)
                manager.wait_until_finished()
                same(manager.restore(1, like=state), state)
            verify(root)
            """,
            tmp_path,
            XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="1",
        )


@pytest.mark.timeout(300)
def test_a_restore_in_waves(tmp_path: Path) -> None:
    """With 64 MiB of the host's memory a gigabyte comes back all the same."""
    run(
        """
        state = tree(1024)
        with CheckpointManager(root, options=Options(host_memory_bytes=64 << 20)) as manager:
            manager.save(1, state)
            manager.wait_until_finished()
            same(manager.restore(1, like=state), state)
        """,
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_unmoved_arrays_are_neither_copied_nor_hashed(tmp_path: Path) -> None:
    """An incremental save of a frozen gigabyte and 4 MiB that move: the base never leaves the
    device again.
    """
    run(
        """
        base = tree(1024)
        with CheckpointManager(root, options=Options(incremental=True)) as manager:
            for step in range(4):
                began = time.perf_counter()
                manager.save(step, {"base": base, "moving": tree(4, step)})
                manager.wait_until_finished()
                print(f"save {step}: {time.perf_counter() - began:.3f} s")
            found = manager.statistics()
            assert found["save_linked_bytes"] == 3 << 30, found
            same(manager.restore(3, like={"base": base, "moving": tree(4)})["base"], base)
        """,
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_barriers_and_global_max_on_the_device(tmp_path: Path) -> None:
    """One process: the collectives of the multihost room run on the accelerator's backend."""
    run(
        """
        from holdfast import multihost
        multihost.sync_global_processes("here", timeout=60)
        assert multihost.global_max([3, -1], timeout_s=60) == [3, -1]
        """,
        tmp_path,
    )

"""What only an accelerator can show: copies to the host, pinned memory that ends, restores into
device memory, collectives.

`make accelerator` runs these where jax finds a GPU or a TPU, and prints their figures; elsewhere
they skip. ACCELERATOR_KIT=cpu runs on the CPU what is not of an accelerator alone, with a tenth of
the sizes. Each runs in a process of its own, which alone sees the device.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, program

ON_CPU = os.environ.get("ACCELERATOR_KIT") == "cpu"


def _environment() -> dict[str, str]:
    """Returns this process's environment, in which jax takes the accelerator; or the CPU."""
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return inherited | ({"JAX_PLATFORMS": "cpu"} if ON_CPU else {})


@functools.cache
def platform() -> str:
    """Returns what jax finds on this machine, asked in another process."""
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    return (
        done.stdout.strip().splitlines()[-1]
        if done.returncode == 0 and done.stdout.strip()
        else "none"
    )


@pytest.fixture(autouse=True)
def accelerator() -> None:
    if "ACCELERATOR_KIT" not in os.environ and platform() not in ("gpu", "tpu"):
        pytest.skip(f"jax finds no accelerator here: {platform()}")


def run(script: Path, root: Path, **environment: str) -> str:
    """Runs a script on the accelerator; returns what it printed."""
    command = [sys.executable, str(script), str(root)]
    done = subprocess.run(
        command,
        env=_environment() | environment,
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
        program("accelerator_save_blocks_for_less"),
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_the_caller_may_donate_at_once(tmp_path: Path) -> None:
    """What the next step does to the same buffers is not in the checkpoint."""
    run(
        program("accelerator_caller_may_donate_at"),
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path) -> None:
    """Random bits of each dtype, NaNs with their payloads among them, keys, empty arrays."""
    run(program("accelerator_every_dtype"), tmp_path)


@pytest.mark.timeout(300)
def test_state_in_pinned_host_is_saved_restored_and_resumed(tmp_path: Path) -> None:
    """An optimizer's moments that live in `pinned_host` and are donated as soon as `save` has
    returned; what goes on from the restored step ends as what was never interrupted.
    """
    run(program("accelerator_pinned_host_state"), tmp_path)


@pytest.mark.timeout(300)
def test_a_pool_of_pinned_memory_that_ends(tmp_path: Path) -> None:
    """A gigabyte of pinned memory and two of state: the rest waits on the device, whether the bound
    is known or has to be run into.
    """
    if ON_CPU:
        pytest.skip("a CPU has no pool of pinned memory")
    for bound in ("", "8"):
        run(
            program("accelerator_pool_ends"),
            tmp_path,
            XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="1",
            TEST_HOST_MEMORY_GB=bound,
        )


@pytest.mark.timeout(300)
def test_a_restore_in_waves(tmp_path: Path) -> None:
    """With 64 MiB of the host's memory a gigabyte comes back all the same."""
    run(
        program("accelerator_restore_waves"),
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_unmoved_arrays_are_neither_copied_nor_hashed(tmp_path: Path) -> None:
    """An incremental save of a frozen gigabyte and 4 MiB that move: the base never leaves the
    device again.
    """
    run(
        program("accelerator_unmoved_arrays_neither_copied"),
        tmp_path,
    )


@pytest.mark.timeout(300)
def test_barriers_and_global_max_on_the_device(tmp_path: Path) -> None:
    """One process: the collectives of the multihost room run on the accelerator's backend."""
    run(
        program("accelerator_barriers_global_max_device"),
        tmp_path,
    )

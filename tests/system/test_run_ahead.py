"""Jobs whose programs make steps faster than their devices, and are preempted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointManager, Options
from tests.support.paths import program

pytestmark = pytest.mark.slow
HOLDFAST = Path(sys.executable).parent / "holdfast"
GRACE_S = 5  # ten steps of the program, where jax takes 32 before it waits


def preempt(
    root: Path, way: str, devices: int = 1, grace_s: int = GRACE_S
) -> tuple[str, int | None]:
    """Runs a job of two, preempts it, and returns its output with the newest step of its root."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    own = [sys.executable, program("runs_ahead"), root, way]
    command = [HOLDFAST, "run", "-n", "2", "--preemption-grace-s", str(grace_s), "--", *own]
    output = ""
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            output += line
            if line.startswith("[0] it goes"):
                job.terminate()
    assert job.returncode == 75, output
    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        return output, manager.latest_step()


@pytest.mark.parametrize(
    ("way", "devices"),
    [("save", 1), ("save", 2), ("should_save", 1)],
)
def test_a_job_that_never_waits_saves_in_time(way: str, devices: int, tmp_path: Path) -> None:
    """A notice of five seconds is enough for steps of half a second: all processes are near
    their devices.
    """
    output, saved = preempt(tmp_path / "run", way, devices)
    assert saved is not None and saved > 3, output


def test_a_loop_that_shows_no_state_is_told_how_far_it_is(tmp_path: Path) -> None:
    """Its devices have all the steps to compute that jax takes: the launcher says so at the notice,
    while the save waits.
    """
    output, _ = preempt(tmp_path / "run", "alone", grace_s=12)
    assert re.search(r"for its devices, which are \d+ steps or more behind; give save or", output)

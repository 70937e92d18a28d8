"""A power cut at the moment of an acknowledgement: the step is there, a local one too where it is
to be.

A file system in an image file is written through a loop device. What was not synced lives in the
page cache of the mounted file system, not in the image; so a copy of the image, taken when the save
is acknowledged, is the disk as a power cut leaves it. Needs root and loop devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local, Options, verify
from tests.support.paths import program

CUTS = 20
FAST_CUTS = 4
IMAGE_MIB = 128


SAVER = program("power_cut_saver")


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    run("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        run("umount", folder)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Makes an ext4 image; skips with the reason where that cannot be mounted."""
    path = tmp_path / "image"
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4")
    with path.open("wb") as file:
        file.truncate(IMAGE_MIB << 20)
    run("mkfs.ext4", "-q", "-F", path)
    try:
        with mounted(path, tmp_path / "try"):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs loop devices: {error.stderr.decode().strip()}")
    return path


def test_the_harness_loses_what_was_not_synced(image: Path, tmp_path: Path) -> None:
    """A file that nobody synced is not on the copy, one that was synced is: the cut is a cut."""
    with mounted(image, tmp_path / "disk") as disk:
        (disk / "synced").write_text("1")
        subprocess.run(["sync", str(disk / "synced"), str(disk)], check=True)
        (disk / "lost").write_text("1")
        run("cp", "--sparse=always", image, tmp_path / "copy")
    with mounted(tmp_path / "copy", tmp_path / "after") as after:
        assert (after / "synced").read_text() == "1" and not (after / "lost").exists()


@pytest.mark.parametrize("kind", ["plain", "incremental", "local"])
@pytest.mark.parametrize("cuts", [FAST_CUTS, pytest.param(CUTS, marks=pytest.mark.slow)])
def test_an_acknowledged_step_survives_a_power_cut(
    image: Path, tmp_path: Path, cuts: int, kind: str
) -> None:
    """After each acknowledgement the disk is as a power cut leaves it: the step is there,
    bit-exact, and so are all listed ones.
    """
    command = [
        sys.executable,
        str(SAVER),
        str(tmp_path / "disk" / "run"),
        str(cuts),
        kind,
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with mounted(image, tmp_path / "disk"):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as saver:
            assert saver.stdin is not None and saver.stdout is not None
            for step in range(1, cuts + 1):
                assert saver.stdout.readline() == f"{step}\n"
                run("cp", "--sparse=always", image, tmp_path / "copy")
                with mounted(tmp_path / "copy", tmp_path / "after") as after:
                    check(after / "run", step, is_local=kind == "local")
                saver.stdin.write("\n")
                saver.stdin.flush()
        assert saver.returncode == 0


def check(root: Path, acknowledged: int, *, is_local: bool) -> None:
    if is_local:
        local = Local(f"{root}-host", save_policy=EveryNSteps(1))
        manager = CheckpointManager(root, save_policy=EveryNSteps(1000), local=local)
    else:
        manager = CheckpointManager(root, options=Options(read_only=True))
    with manager:
        steps = manager.all_steps()
        assert steps[-1] == acknowledged
        for step in steps:
            if not is_local:
                verify(root / str(step))
            got = manager.restore(step)
            assert got["step"] == step and all(
                np.array_equal(got[f"w{i}"], np.arange(100_000) + step * (i > 2)) for i in range(4)
            )

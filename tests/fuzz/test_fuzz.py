"""What is in the corpora is answered with a value or a typed error; then seconds of new inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

from .targets import TARGETS, known


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_known_inputs_are_answered(target: str) -> None:
    """Those among them that were once answered with a bare error."""
    for data in known(target):
        TARGETS[target].run(data)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_new_inputs_are_answered(target: str, tmp_path: Path) -> None:
    """Drawn by what code they reach."""
    pytest.importorskip("atheris", reason="wants atheris, which make slow installs")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fuzz",
            target,
            "--seconds",
            "60",
            "--folder",
            tmp_path / "in",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]

"""Builds the wheel as its users get it, and an empty environment that has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

_NOT_SOURCE = (".venv", ".git", "build", "demo-run", "__pycache__", "*.egg-info")


def build_wheel(folder: Path, timeout_s: float = 110) -> Path:
    """Builds into a folder; returns the wheel."""
    # A copy, because setuptools leaves build/lib behind, and the next wheel would hold what has
    # been deleted since.
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "-w", folder, source], check=True, timeout=timeout_s)
    return next(folder.glob("holdfast_jax-*.whl"))


class EmptyEnvironment:
    """A virtual environment with nothing in it, and a home folder of its own."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=110)
        self._commands = folder / "env" / "bin"
        # Nothing of this checkout may be found: neither by PYTHONPATH nor by an installed package.
        self.variables = {
            "PATH": f"{self._commands}:{os.environ['PATH']}",
            "HOME": str(folder),
            "JAX_PLATFORMS": "cpu",
        }

    def command(self, name: str) -> str:
        """Returns the path of a command of the environment."""
        return str(self._commands / name)

    def install(self, *packages: object) -> None:
        """Installs from the package index, or a file."""
        pip = [self.command("python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *map(str, packages)], env=self.variables, check=True, timeout=900)

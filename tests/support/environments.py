"""Virtual environments of other Pythons and other versions of libraries, made once under build/."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def find_python(version: str) -> str:
    """Finds a Python of this version that runs: on PATH, as the Makefile does, or among pyenv's.
    Without one it skips, and in CI fails.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [
        sys.executable,
        f"python{version}",
        *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)),
    ]
    check = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for place in filter(shutil.which, places):
        if subprocess.run([place, "-c", check], capture_output=True, check=False).returncode == 0:
            return place
    missing = (
        f"no Python {version} that runs with venv and ensurepip: looked at {', '.join(places)} and"
        f" in {pyenv}"
    )
    assert not os.environ.get("CI"), missing
    pytest.skip(missing)


def environment(name: str, version: str, packages: Sequence[str]) -> Path:
    """Makes (once) a virtual environment of a Python with these packages, as pip takes them, under
    build/, and returns its interpreter.
    """
    folder = ROOT / "build" / "venvs" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One at a time: each writes the metadata of the editable holdfast into the source tree.
    with (folder.parent / "making.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = folder / ".ready"
        python = folder / "bin" / "python"
        own = tomllib.loads((ROOT / "pyproject.toml").read_text())
        groups = own["dependency-groups"] if "--group" in packages else {}
        wanted = repr([list(packages), own["project"], groups])
        if not ready.exists() or ready.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([find_python(version), "-m", "venv", folder], check=True)
            pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            # Older pips know no dependency groups.
            subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
            subprocess.run([*pip, *packages], check=True)
            ready.write_text(wanted)
    return python

"""Both ends of what is supported: the lowest versions that pyproject.toml admits, and the newest Python with the newest jax."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROOMS = ["coordination", "multihost", "checkpoint", "main_job"]
LOWEST = [
    "jax==0.10.0",
    "jaxlib==0.10.0",
    "numpy==2.0.2",
    "absl-py==2.0.0",
    "grpcio==1.66.2",
    "protobuf==5.27.2",
    "tensorstore==0.1.84",
    "crc32c==2.7.1",
    "click==8.1.7",
    "rich==13.7.1",
]
ENDS = {
    "lowest": ("3.11", LOWEST),
    "jax-0.11": ("3.13", ["jax==0.11.*"]),
    "newest": ("3.13", ["jax>=0.12"]),
}


def _python(version: str) -> str:
    """Finds an interpreter of this version on the path or among pyenv's, or skips."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [*sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True), shutil.which(f"python{version}")]
    for place in filter(None, places):
        if subprocess.run([place, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return str(place)
    pytest.skip(f"no Python {version} on this machine")


def _environment(end: str) -> Path:
    """Makes (once) a virtual environment for one end under build/, and returns its interpreter."""
    version, pins = ENDS[end]
    folder = ROOT / "build" / "venvs" / end
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{end}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready, python = folder / ".ready", folder / "bin" / "python"
        wanted = f"{pins}\n{(ROOT / 'pyproject.toml').read_text()}"
        if not ready.exists() or ready.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([_python(version), "-m", "venv", folder], check=True)
            pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, "-e", f"{ROOT}[test]", *pins], check=True)
            ready.write_text(wanted)
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("end", ENDS)
def test_the_fast_tests_pass_at_both_ends(end: str, room: str) -> None:
    """The fast tests of a room pass at this end."""
    tests = sorted(str(path) for path in (ROOT / "tests").glob(f"test_{room}*.py"))
    command = [_environment(end), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=850)
    assert ran.returncode in (0, 5), ran.stdout + ran.stderr

"""The name on the package index: what is installed bears it, and messages name real extras."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib

import pytest

from holdfast.coordination.distribution import DISTRIBUTION, install_command
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_installed_distribution_bears_the_name() -> None:
    """pyproject.toml, the metadata of what is installed, and the messages name the same."""
    assert PROJECT["project"]["name"] == DISTRIBUTION
    installed = importlib.metadata.version(DISTRIBUTION)
    assert installed == PROJECT["project"]["version"]
    ran = subprocess.run(
        [sys.executable, "-c", "from holdfast.cli import main; main(['--version'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert installed in ran.stdout


def test_the_command_names_the_distribution() -> None:
    """Quoted, as shells want brackets."""
    assert install_command("ray") == "pip install 'holdfast-jax[ray]'"


def _sources() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.yml", "*.toml", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.split()


def test_nothing_installs_a_strangers_package() -> None:
    """No page, message or script says `pip install holdfast`, which is another project."""
    stranger = re.compile(r"pip install[^`\n]*[\s'\"]holdfast(\[|['\"`\s]|$)|\"holdfast\[")
    found = {
        f"{name}: {line.strip()}"
        for name in _sources()
        if name != "tests/coordination/test_distribution.py"
        for line in (ROOT / name).read_text().splitlines()
        if stranger.search(line)
    }
    assert found == set()


def test_every_extra_that_is_named_exists() -> None:
    """`install_command("x")` names an extra of pyproject.toml."""
    extras = set(PROJECT["project"]["optional-dependencies"])
    named = {
        extra
        for name in _sources()
        if name.endswith(".py") and not name.startswith("tests/")
        for extra in re.findall(r'install_command\("(\w+)"\)', (ROOT / name).read_text())
    }
    assert named and named <= extras

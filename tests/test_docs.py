"""The code in README.md and docs/ runs as it stands there, each page in one fresh process and
folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.libraries import need_installed
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = {"brax.md", "keras.md"}  # need what `make slow` alone installs
_OTHERS = re.compile(r"^(?:import|from) (brax|grain|keras)\b", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"tests/[a-z_/]*test_[a-z_]+\.py")
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


WITH_CODE: list[Any] = [
    pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else [])
    for page in PAGES
    if _BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """All ```python blocks of a page run in order as one program (those marked ```python notest do
    not).
    """
    for library in _OTHERS.findall(page.read_text()):
        need_installed(library, "make slow-libraries")
    program = tmp_path / "page.py"
    program.write_text("\n".join(_BLOCK.findall(page.read_text())))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "HOME": str(tmp_path),
    }
    ran = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, f"{page.name}:\n{program.read_text()}\n{ran.stdout}{ran.stderr}"


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "adr").glob("*.md"))],
    ids=lambda p: p.name,
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file that exists."""
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))],
    ids=lambda p: p.name,
)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Evidence can be found."""
    for name in _TEST.findall(page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"

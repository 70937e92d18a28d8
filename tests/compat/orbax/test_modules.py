"""No name of Orbax's falls through: each is covered, or refused with a reason, and the page lists
it as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, program


def test_every_public_name_is_on_the_page(tmp_path: Path) -> None:
    """The script that goes through the installed Orbax finds a counterpart for each name;
    docs/from-orbax.md is what it writes.
    """
    command = [sys.executable, ROOT / "scripts" / "list_orbax_names.py", tmp_path / "page.md"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    text = (tmp_path / "page.md").read_text()
    assert text == (ROOT / "docs" / "from-orbax.md").read_text(), (
        "run python scripts/list_orbax_names.py"
    )
    assert (
        text.count("| refused |") > 30
        and "`StandardSave`" in text
        and "`orbax.checkpoint.v1.training`" in text
    )


def test_no_orbax_is_imported() -> None:
    """The stand-ins work where Orbax is not installed."""
    ran = subprocess.run(
        [sys.executable, program("without_orbax")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("module", ["v1", "items"])
def test_a_module_may_be_imported_first(module: str) -> None:
    """Which of the face's modules a program imports first does not matter."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import holdfast.compat.orbax.{module}"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr

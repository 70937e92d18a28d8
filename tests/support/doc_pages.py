"""The pages of the documentation: what their readers type."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALL = re.compile(r"pip install ([^`\n)]+)")
_LIBRARY = re.compile(r"[A-Za-z][\w-]*(?:\[\w+\])?(?:[<>=]=?[\d.]+)?")


def program_of(page: Path, *kinds: str) -> str:
    """Returns the blocks of these kinds (those that run: ```python) in order, as one program."""
    found = BLOCK.findall(page.read_text())
    return "\n".join(block for kind, block in found if kind in (kinds or ("python",)))


def libraries_of(page: Path) -> list[str]:
    """Returns what a page tells its readers to install by name."""
    words = " ".join(_INSTALL.findall(page.read_text())).split()
    return [word for word in (each.strip("\"'") for each in words) if _LIBRARY.fullmatch(word)]

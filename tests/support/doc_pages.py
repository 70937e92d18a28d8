"""The pages of the documentation: what their readers type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

# Pages whose sections have a program each.
_BY_SECTION = {"extending.md", "libraries.md", "preemption.md"}
# The site's first page is made of README.
_FIRST = ROOT / "docs" / "index.md"
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {_FIRST})]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALL = re.compile(r"pip install ([^`\n)]+)")
_LIBRARY = re.compile(r"[A-Za-z][\w-]*(?:\[\w+\])?(?:[<>=]=?[\d.]+)?")


class Part(NamedTuple):
    """A page, or a section with a program of its own."""

    name: str
    text: str

    @property
    def program(self) -> str:
        """The blocks that run, ```python, in order, as one program."""
        return _joined(self.text, "python")

    @property
    def libraries(self) -> list[str]:
        """What readers are told to install by name."""
        words = " ".join(_INSTALL.findall(self.text)).split()
        return [word for word in (each.strip("\"'") for each in words) if _LIBRARY.fullmatch(word)]


def parts() -> Iterator[Part]:
    """Yields the pages, those with several programs by section."""
    for page in PAGES:
        if page.name not in _BY_SECTION:
            yield Part(page.name, page.read_text())
            continue
        for section in page.read_text().split("\n## ")[1:]:
            yield Part(f"{page.name}: {section.splitlines()[0]}", section)


def program_of(page: Path, kind: str = "python") -> str:
    """Returns the blocks of this kind in a page in order, as one program."""
    return _joined(page.read_text(), kind)


def _joined(text: str, kind: str) -> str:
    return "\n".join(block for found, block in BLOCK.findall(text) if found == kind)

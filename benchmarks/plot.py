"""Draws the plots of benchmarks: text as a picture beside them."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console


def draw(text: str, name: str, title: str) -> None:
    """Writes `text` as the picture `name`."""
    console = Console(record=True, file=io.StringIO(), width=74)
    console.print(text, highlight=False)
    console.save_svg(str(Path(__file__).parent / name), title=title)

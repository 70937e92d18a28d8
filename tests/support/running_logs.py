"""Reads what others are writing still."""

from __future__ import annotations

from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file that are written to their ends; none if it is not there yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []

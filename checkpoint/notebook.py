"""What notebooks and interpreters show of this room's objects: short words, and tables in HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping

_UNIT = 1000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def shown_bytes(nbytes: float) -> str:
    """Returns a size in words, such as "1.2 GB"."""
    unit = 0
    while nbytes >= _UNIT and unit < len(_UNITS) - 1:
        nbytes /= _UNIT
        unit += 1
    return f"{nbytes:.1f} {_UNITS[unit]}" if unit else f"{nbytes:.0f} B"


def shown_steps(steps: list[int]) -> str:
    """Returns how many steps there are, and the latest."""
    if not steps:
        return "no steps"
    return f"{len(steps)} step{'s' if len(steps) > 1 else ''}, latest {steps[-1]}"


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Returns a table of names and values. What users have chosen is escaped: it is shown, and
    nothing of it runs.
    """
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"

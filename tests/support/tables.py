"""Reads a table of the commands back, whatever width it was printed for."""

from __future__ import annotations

import re
from collections.abc import Sequence

_COMMON = "in each row: "


def read_table(text: str, titles: Sequence[str], keys: Sequence[str]) -> list[dict[str, str]]:
    """Returns the rows by title, without cells that are empty.

    The table begins with the line whose first word is the first of `titles`. `keys` has the first
    cells of its rows. All spaces are left out: a text may have been broken anywhere.
    """
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if re.match(rf" *{titles[0]}(  |$)", line))
    header = _words(lines[begin])
    assert all(title in titles for title in header.values()), lines[begin]
    rows: list[dict[str, str]] = []
    details: list[str] = []
    common = ""
    for line in lines[begin + 1 :]:
        cells = _cells(line, header)
        if line.startswith(_COMMON):
            common = line
        elif common and line.strip():
            common += f" {line}"
        elif not line.strip() or common:
            break
        elif cells is None:
            details[-1] += f" {line.strip()}"
        elif rows and len(cells) == 1 and _goes_on(rows[-1][titles[0]], cells[titles[0]], keys):
            rows[-1][titles[0]] += cells[titles[0]]
        else:
            rows.append(cells)
            details.append("")
    for row, detail in zip(rows, details, strict=True):
        row |= _facts(detail, titles) | _facts(common.removeprefix(_COMMON), titles)
    return [{title: value.replace(" ", "") for title, value in row.items()} for row in rows]


def _words(line: str) -> dict[tuple[int, int], str]:
    """Returns what is between gaps of two spaces, by where it begins and ends."""
    return {match.span(): match[0] for match in re.finditer(r"\S+(?: \S+)*", line)}


def _cells(line: str, header: dict[tuple[int, int], str]) -> dict[str, str] | None:
    """Returns a row's cells by title, each at the left or the right edge of its title; None for
    what is no row.
    """
    cells = {}
    for (begin, end), word in _words(line).items():
        below = [title for (left, right), title in header.items() if left == begin or right == end]
        if len(below) != 1:
            return None
        cells[below[0]] = word
    return cells if next(iter(header.values())) in cells else None


def _goes_on(cell: str, more: str, keys: Sequence[str]) -> bool:
    whole = {key.replace(" ", "") for key in keys}
    begun = cell.replace(" ", "")
    longer = f"{begun}{more}".replace(" ", "")
    return begun not in whole and any(key.startswith(longer) for key in whole)


def _facts(text: str, titles: Sequence[str]) -> dict[str, str]:
    """Returns `title: value  title: value` by title."""
    names = "|".join(map(re.escape, titles))
    parts = re.split(rf"(?:^|\s)({names}): ", text)
    assert not parts[0].strip(), text
    return dict(zip(parts[1::2], parts[2::2], strict=True))

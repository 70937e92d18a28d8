"""Tables that stay readable at any width: no column is lost, and none is squeezed.

On a terminal that is too narrow, the least important columns leave the table. What all rows have in
common is then printed once, below it. The rest is printed below each row, as `title: value`. In a
pipe a row is one line, however long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from holdfast.coordination.diagnosis.summary import printable

_GAP = "  "
_INDENT = "    "
_NO_EDGE = 1_000_000  # columns: of a pipe, where lines end with their text
_LEAST = 20  # columns: the first column is not squeezed below that


def console() -> Console:
    """Returns the console for tables: as wide as the terminal, or COLUMNS; a pipe has no edge."""
    columns = os.environ.get("COLUMNS", "")
    has_edge = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return Console(soft_wrap=True, highlight=False, width=None if has_edge else _NO_EDGE)


@dataclass(frozen=True)
class Table:
    """Rows of cells under titles, as rich renders it.

    `folds` has the titles that leave the table on a narrow terminal, the least important first. The
    first column never leaves: there its texts are broken. A cell that is no Text is plain text,
    and cannot steer the terminal.
    """

    titles: Sequence[str]
    folds: Sequence[str]
    numbers: Sequence[str] = ()  # titles of columns that end at the right
    rows: list[list[Text]] = field(default_factory=list)

    def add(self, *texts: str | Text) -> None:
        """Adds a row, with a cell for each title."""
        assert len(texts) == len(self.titles)
        self.rows.append([_text(cell) for cell in texts])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines, for rich."""
        width = options.max_width
        shown = self._shown(width)
        widths = [self._width(column) for column in shown]
        widths[0] = min(widths[0], max(_LEAST, width - self._others(shown)))
        folded = [column for column in range(len(self.titles)) if column not in shown]
        common = [column for column in folded if self._is_common(column)]
        own = [column for column in folded if column not in common]
        titles = [Text(self.titles[column], style="bold") for column in shown]
        yield from self._lines(console, titles, shown, widths)
        for row in self.rows:
            yield from self._lines(console, [row[column] for column in shown], shown, widths)
            yield from _details(console, self._facts(row, own), width)
        if common:
            facts = self._facts(self.rows[0], common)
            yield from _details(console, facts, width, before="in each row: ", indent="")

    def _shown(self, width: int) -> list[int]:
        """Returns the columns that fit into the width: the first one at least."""
        folds = [self.titles.index(title) for title in self.folds if title in self.titles]
        # A column that says the same in each row costs a line in all, not a line a row.
        folds.sort(key=lambda column: not self._is_common(column))
        shown = list(range(len(self.titles)))
        first = min(self._width(0), max(_LEAST, width * 2 // 3))
        for column in folds:
            if first + self._others(shown) <= width:
                break
            shown.remove(column)
        return shown

    def _others(self, shown: Sequence[int]) -> int:
        """Returns the width of all columns but the first, with the gaps before them."""
        return sum(len(_GAP) + self._width(column) for column in shown[1:])

    def _width(self, column: int) -> int:
        widths = [row[column].cell_len for row in self.rows]
        return max([len(self.titles[column]), *widths])

    def _is_common(self, column: int) -> bool:
        return len(self.rows) > 1 and len({row[column].plain for row in self.rows}) == 1

    def _facts(self, row: Sequence[Text], columns: Iterable[int]) -> list[Text]:
        """Returns the cells of columns that are not in the table; an empty one says nothing."""
        return [
            Text.assemble((f"{self.titles[column]}: ", "bold"), row[column])
            for column in columns
            if row[column].plain
        ]

    def _lines(
        self, console: Console, texts: Sequence[Text], shown: Sequence[int], widths: Sequence[int]
    ) -> Iterator[Text]:
        first, *others = texts
        pieces = first.wrap(console, widths[0], overflow="fold") or [Text()]
        for number, piece in enumerate(pieces):
            line = [piece, *(others if number == 0 else ())]
            yield self._line(line, shown, widths)

    def _line(self, texts: Sequence[Text], shown: Sequence[int], widths: Sequence[int]) -> Text:
        line = Text(no_wrap=True, overflow="ignore")
        for cell, column, width in zip(texts, shown, widths, strict=False):
            padding = " " * (width - cell.cell_len)
            if line:
                line.append(_GAP)
            is_number = self.titles[column] in self.numbers
            line.append_text(Text.assemble(padding, cell) if is_number else cell + Text(padding))
        line.rstrip()
        return line


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(printable(cell))


def _details(
    console: Console,
    facts: Sequence[Text],
    width: int,
    *,
    before: str = "",
    indent: str = _INDENT,
) -> Iterator[Text]:
    """Yields facts in lines: as many in one as fit, and one that does not fit is broken."""
    room = width - len(indent)
    lines = [Text(before)]
    for number, fact in enumerate(facts):
        if number and lines[-1].cell_len + len(_GAP) + fact.cell_len > room:
            lines.append(Text())
        elif number:
            lines[-1].append(_GAP)
        lines[-1].append_text(fact)
    for line in lines if facts else ():
        for piece in line.wrap(console, room, overflow="fold"):
            piece.rstrip()
            yield Text.assemble(indent, piece, no_wrap=True, overflow="ignore")

"""The block of results: what was measured so far, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plan import Part


@dataclass(frozen=True)
class Row:
    """A figure, and what it stands beside."""

    what: str
    figure: str
    beside: str = ""


@dataclass
class PartResult:
    """What came of a part so far."""

    part: Part
    outcome: str = "runs"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    not_run: list[Row] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Adds a figure. One of the same name stands in the place of the one before."""
        names = [each.what for each in self.rows]
        if row.what in names:
            self.rows[names.index(row.what)] = row
        else:
            self.rows.append(row)

    @property
    def title(self) -> str:
        return f"{self.part.letter}. {self.part.name}"


@dataclass
class Results:
    """All that is known of a run."""

    machine: Mapping[str, str]
    remarks: list[str] = field(default_factory=list)
    parts: list[PartResult] = field(default_factory=list)

    def to_markdown(self) -> str:
        """Returns the block."""
        lines = ["# RESULTS of the accelerator kit", "", *_table(("machine", ""), self.machine)]
        lines += ["", *(f"- {_cell(remark)}" for remark in self.remarks)]
        seconds = {each.title: f"{each.seconds:.0f} s, {each.outcome}" for each in self.parts}
        lines += ["", *_table(("part", "took"), seconds)]
        for each in self.parts:
            lines += _part_lines(each)
        missed = [(each, row) for each in self.parts for row in each.not_run]
        if missed:
            lines += ["", "## Not run", ""]
            lines += [f"- {each.part.letter}: {row.what}: {row.figure}" for each, row in missed]
        return "\n".join(lines) + "\n"


def _part_lines(result: PartResult) -> list[str]:
    if not result.rows and not result.tail:
        return []
    lines = ["", f"## {result.title}", ""]
    if result.rows:
        lines += ["| what | figure | beside |", "|---|---|---|"]
        lines += [
            f"| {_cell(row.what)} | {_cell(row.figure)} | {_cell(row.beside)} |"
            for row in result.rows
        ]
    if result.tail:
        lines += ["", f"{result.outcome}; the end of its output:", "", "```"]
        lines += [*result.tail, "```"]
    return lines


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return lines + [f"| {_cell(name)} | {_cell(text)} |" for name, text in rows.items()]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())

"""Draws docs/architecture.svg: the rooms, their wings on their floors, and which imports which.

python scripts/draw_architecture.py [FILE]

The floors are those of pyproject.toml that import-linter holds; arrows are the imports of the
source, less those that follow from others.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 840
GAP = 20
PAD = 16
ROW = 70
LEAST = 100  # of a box's width: a floor with more boxes has another row
TITLE = 72
STYLE = """
  svg { font-family: system-ui, sans-serif; }
  .page { fill: #fff; }
  .room { fill: #f6f8fa; stroke: #8c959f; }
  .wing { fill: #fff; stroke: #57606a; }
  .file { fill: #fff; stroke: #57606a; stroke-dasharray: 4 3; }
  .title { font-size: 17px; font-weight: 600; fill: #1f2328; }
  .name { font-size: 14px; font-weight: 600; fill: #1f2328; }
  .purpose { font-size: 11px; fill: #57606a; }
  .arrow { stroke: #0969da; stroke-width: 1.2; fill: none; opacity: .55; }
  .head { fill: #0969da; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; }
    .room { fill: #161b22; stroke: #484f58; }
    .wing, .file { fill: #0d1117; stroke: #8b949e; }
    .title, .name { fill: #e6edf3; }
    .purpose { fill: #8b949e; }
    .arrow { stroke: #58a6ff; }
    .head { fill: #58a6ff; }
  }
"""


class Box(NamedTuple):
    """A rectangle of the picture."""

    x: float
    y: float
    width: float
    height: float


def contracts() -> dict[str, list[list[str]]]:
    """Returns the floors of each layers contract, from the top, as lists of names."""
    found = {}
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]:
        if contract["type"] == "layers":
            found[contract["id"]] = [
                [name.strip() for name in floor.split("|")] for floor in contract["layers"]
            ]
    return found


def modules_of(path: Path) -> Iterator[list[str]]:
    """Yields the modules of ours that a file imports, as lists of names below `holdfast`."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [*base, *(node.module or "").split(".")] if node.module else base
            if not node.level:
                names = names[1:] if names[0] == "holdfast" else []
            if names:
                yield from ([*names, alias.name] for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.split(".")[1:]
                for alias in node.names
                if alias.name.startswith("holdfast.")
            )


def imports(depth: int, folder: str = "") -> dict[str, set[str]]:
    """Returns which rooms, or wings and files of the room `folder`, import which others.

    `depth` is 0 for rooms, 1 for the inside of a room.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(
        (ROOT / folder).rglob("*.py")
        if folder
        else (p for room in contracts()["rooms"] for r in room for p in _room(r))
    ):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) <= depth:
            continue
        for names in modules_of(path):
            if (
                len(names) > depth
                and names[:depth] == list(parts[:depth])
                and names[depth] != parts[depth]
            ):
                found.setdefault(parts[depth], set()).add(names[depth])
    return found


def _room(name: str) -> list[Path]:
    return [
        path
        for path in (ROOT / name.removeprefix("holdfast.")).rglob("*.py")
        if "_pb2" not in path.name
    ]


def reduced(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns the arrows that do not follow from others."""

    def reached(start: str) -> set[str]:
        return set().union(*({there} | reached(there) for there in arrows.get(start, ())))

    return {
        start: {end for end in ends if not any(end in reached(other) for other in ends - {end})}
        for start, ends in arrows.items()
    }


def purpose_of(path: Path) -> str:
    """Returns the first sentence of a module's docstring."""
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = (
        (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    )
    return text.split(". ")[0].rstrip(".")


class Picture:
    """Collects the shapes, those behind first, and remembers where each box stands."""

    def __init__(self) -> None:
        self.behind: list[str] = []
        self.arrows: list[str] = []
        self.shapes: list[str] = []
        self.boxes: dict[str, Box] = {}

    def box(self, key: str, box: Box, kind: str) -> None:
        self.boxes[key] = box
        shapes = self.behind if kind == "room" else self.shapes
        shapes.append(
            f'<rect class="{kind}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}"'
            f' height="{box.height:g}" rx="6"/>'
        )

    def text(self, x: float, y: float, kind: str, text: str) -> None:
        self.shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def lines(self, x: float, y: float, kind: str, text: str, width: float) -> None:
        """Writes a text in at most three lines, at about 6 px a letter."""
        found = textwrap.wrap(text, int(width / 6), max_lines=3, placeholder=" ...")
        for number, line in enumerate(found):
            self.text(x, y + 13 * number, kind, line)

    def arrow(self, start: Box, end: Box) -> None:
        x1 = start.x + start.width / 2
        y1 = start.y + start.height
        x2 = end.x + end.width / 2
        y2 = end.y
        bend = (y2 - y1) / 2
        self.arrows.append(
            f'<path class="arrow" marker-end="url(#head)" d="M{x1:g},{y1:g} C{x1:g},{y1 + bend:g}'
            f' {x2:g},{y2 - bend:g} {x2:g},{y2 - 3:g}"/>'
        )

    def room(self, name: str, x: float, y: float, width: float) -> float:
        """Draws a room with its wings, and returns its height."""
        most = int((width - PAD) / (LEAST + PAD))
        floors = [
            floor[first : first + most]
            for floor in contracts().get(name, [])
            for first in range(0, len(floor), most)
        ]
        height = TITLE + PAD + (len(floors) * (ROW + GAP) - GAP + PAD if floors else 0)
        self.box(name, Box(x, y, width, height), "room")
        self.text(x + PAD, y + 23, "title", name)
        self.lines(x + PAD, y + 40, "purpose", purpose_of(ROOT / name), width - 2 * PAD)
        for row, floor in enumerate(floors):
            each = (width - PAD - PAD * len(floor)) / len(floor)
            for column, wing in enumerate(floor):
                box = Box(
                    x + PAD + column * (each + PAD),
                    y + TITLE + PAD / 2 + row * (ROW + GAP),
                    each,
                    ROW,
                )
                is_wing = (ROOT / name / wing).is_dir()
                self.box(f"{name}.{wing}", box, "wing" if is_wing else "file")
                self.text(box.x + 10, box.y + 19, "name", wing)
                self.lines(
                    box.x + 10, box.y + 35, "purpose", purpose_of(ROOT / name / wing), each - 16
                )
        for start, ends in sorted(reduced(imports(1, name)).items()):
            for end in sorted(ends):
                if {f"{name}.{start}", f"{name}.{end}"} <= self.boxes.keys():
                    self.arrow(self.boxes[f"{name}.{start}"], self.boxes[f"{name}.{end}"])
        return height


def draw() -> str:
    """Returns the picture."""
    picture = Picture()
    y = float(PAD)
    for floor in contracts()["rooms"]:
        rooms = [name.removeprefix("holdfast.") for name in floor]
        shares = [1.45 if name == "checkpoint" else 1.0 for name in rooms]
        x = float(PAD)
        tallest = 0.0
        for name, share in zip(rooms, shares, strict=True):
            width = (WIDTH - 2 * PAD - PAD * (len(rooms) - 1)) * share / sum(shares)
            tallest = max(tallest, picture.room(name, x, y, width))
            x += width + PAD
        y += tallest + 1.6 * GAP
    for start, ends in sorted(reduced(imports(0)).items()):
        for end in sorted(ends):
            picture.arrow(picture.boxes[start], picture.boxes[end])
    tip = '<path class="head" d="M0,0 L8,4 L0,8 z"/>'
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7"'
        f' orient="auto">{tip}</marker>'
    )
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" role="img"'
                ' aria-label="Rooms and wings of holdfast">'
            ),
            f"<style>{STYLE}</style><defs>{head}</defs>",
            f'<rect class="page" width="{WIDTH}" height="{y:g}"/>',
            *picture.behind,
            *picture.arrows,
            *picture.shapes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "architecture.svg"
    target.write_text(draw())
    print(target)

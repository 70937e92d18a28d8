"""A checkpoint as a page: a treemap of its sizes, and each leaf with its shape, its shards and,
where they were counted, its values. Pure.

The treemap is squarified: M. Bruls, K. Huizing, J. van Wijk, "Squarified treemaps" (2000).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

WIDTH = 1000.0
HEIGHT = 420.0
MOST_CELLS = 1000
"""Leaves in the treemap; what is smaller is one cell."""
_MOST_LINES = 32  # of one picture of shards
_COLOURS = 8
_LABEL_WIDTH = 70
_LABEL_HEIGHT = 16
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --panel: #f6f8fa; --bar: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --panel: #151b23; --bar: #58a6ff; }
}
body { margin: 0 auto; max-width: 75rem; padding: 1rem; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 1.5rem; } p { color: var(--soft); }
svg.map { width: 100%; height: auto; } svg.map text { font: 12px system-ui, sans-serif; fill: #0d1117; pointer-events: none; }
svg.map rect { stroke: var(--page); }
table { border-collapse: collapse; width: 100%; font-size: 14px; } th, td { text-align: left; padding: .2rem .75rem .2rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; vertical-align: top; } th { color: var(--soft); }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg.shards { stroke: var(--bar); fill: var(--panel); } svg.bars { fill: var(--bar); }
"""


class Cell(NamedTuple):
    """A rectangle of the treemap, and the leaf that it stands for."""

    x: float
    y: float
    width: float
    height: float
    number: int


def checkpoint_page(shown: Mapping[str, Any]) -> str:
    """Returns what `holdfast show --json` says of a checkpoint as one page that needs nothing
    else.
    """
    arrays = [leaf for leaf in shown["leaves"] if leaf.get("bytes") is not None]
    total = sum(leaf["bytes"] for leaf in arrays)
    step = f"step {shown['step']} of " if shown["step"] is not None else ""
    title = escape(f"{step}{shown['path']} ({shown['layout']})")
    facts = "".join(
        f"<p>{name}: {escape(str(shown[name]))}</p>"
        for name in ("metrics", "metadata")
        if shown[name]
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><main><h1>{title}</h1>'
        f"<p>{len(shown['leaves'])} leaves, {_size(total)}</p>{facts}"
        f"<h2>Sizes</h2>{_treemap(arrays)}<h2>Leaves</h2>{_table(shown['leaves'])}</main></body></html>\n"
    )


def squarify(
    sizes: Sequence[float], x: float, y: float, width: float, height: float
) -> Iterator[Cell]:
    """Yields a rectangle for each of `sizes`, which fall and are above 0: together they fill the
    given one, each as square as can be.
    """
    scale = width * height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    first = 0
    while first < len(areas):
        side = min(width, height)
        last = first + 1
        while last < len(areas) and _worst(areas[first : last + 1], side) <= _worst(
            areas[first:last], side
        ):
            last += 1
        row = areas[first:last]
        depth = (
            min(sum(row) / side, max(width, height)) if side else 0.0
        )  # a rounding must not leave the place
        at = 0.0
        for offset, area in enumerate(row):
            length = side * area / sum(row)
            down = width >= height  # the row is a column at the left
            yield Cell(
                x if down else x + at,
                y + at if down else y,
                depth if down else length,
                length if down else depth,
                first + offset,
            )
            at += length
        if width >= height:
            x, width = x + depth, max(0.0, width - depth)
        else:
            y, height = y + depth, max(0.0, height - depth)
        first = last


def _worst(areas: Sequence[float], side: float) -> float:
    total = sum(areas)
    return (
        max(side * side * max(areas) / total**2, total**2 / (side * side * min(areas)))
        if side and total
        else 0.0
    )


def _treemap(arrays: Sequence[Mapping[str, Any]]) -> str:
    leaves = sorted((leaf for leaf in arrays if leaf["bytes"]), key=lambda leaf: -leaf["bytes"])
    shown = leaves[:MOST_CELLS]
    rest = leaves[MOST_CELLS:]
    labels = [(f"{leaf['item']}/{leaf['path']}", leaf["bytes"]) for leaf in shown]
    if rest:
        labels = sorted(
            [*labels, (f"{len(rest)} smaller leaves", sum(leaf["bytes"] for leaf in rest))],
            key=lambda label: -label[1],
        )
    groups = {
        name: number
        for number, name in enumerate(
            dict.fromkeys(label.rpartition(".")[0] for label, _ in labels)
        )
    }
    drawn = [
        _cell(cell, *labels[cell.number], groups)
        for cell in squarify([size for _, size in labels], 0, 0, WIDTH, HEIGHT)
    ]
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="Sizes of'
        ' the leaves; the table below says them">'
        f"{''.join(drawn)}</svg>"
    )


def _cell(cell: Cell, label: str, size: int, groups: Mapping[str, int]) -> str:
    hue = groups[label.rpartition(".")[0]] % _COLOURS * (360 // _COLOURS)
    box = f'x="{cell.x:.1f}" y="{cell.y:.1f}" width="{cell.width:.1f}" height="{cell.height:.1f}"'
    name = label.rpartition("/")[2]
    most = int((cell.width - 8) / 7)
    text = f'<text x="{cell.x + 4:.1f}" y="{cell.y + 14:.1f}">{escape(name[-most:])}</text>'
    fits = cell.width > _LABEL_WIDTH and cell.height > _LABEL_HEIGHT
    return (
        f'<g><title>{escape(label)}: {_size(size)}</title><rect {box} fill="hsl({hue} 60%'
        f' 75%)"/>{text if fits else ""}</g>'
    )


def _table(leaves: Sequence[Mapping[str, Any]]) -> str:
    counted = any(leaf.get("stats") for leaf in leaves)
    columns = ("item", "path", "type", "shape", "size", "sharding") + (
        ("min", "max", "mean", "NaN", "values") if counted else ()
    )
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(_row(leaf, counted) for leaf in leaves)}</tbody></table>"


def _row(leaf: Mapping[str, Any], counted: bool) -> str:
    cells = [
        f"<td>{escape(str(text))}</td>" for text in (leaf["item"], leaf["path"], leaf["dtype"])
    ]
    if leaf.get("bytes") is None:
        cells.append(f'<td colspan="3">{escape(repr(leaf.get("value"))[:200])}</td>')
    else:
        cells.append(f"<td>{escape(str(leaf['shape']))}</td>")
        cells.append(f'<td class="number">{_size(leaf["bytes"])}</td>')
        cells.append(f"<td>{_shards(leaf.get('shards') or [])} {escape(leaf['sharding'])}</td>")
    if counted:
        cells += _values(leaf.get("stats"))
    return f"<tr>{''.join(cells)}</tr>"


def _shards(counts: Sequence[int]) -> str:
    """Returns a picture of an array that is cut along its first two dimensions that are; "" for one
    that is not.
    """
    cuts = [min(count, _MOST_LINES) for count in counts if count > 1][:2]
    if not cuts:
        return ""
    down, across = cuts[0], cuts[1] if len(cuts) > 1 else 1
    lines = [f'<path d="M0 {40 * n / down:.1f}H60"/>' for n in range(1, down)] + [
        f'<path d="M{60 * n / across:.1f} 0V40"/>' for n in range(1, across)
    ]
    label = " by ".join(str(count) for count in counts if count > 1)
    head = f'<svg class="shards" width="60" height="40" role="img" aria-label="{label} shards">'
    return f'{head}<rect width="60" height="40"/>{"".join(lines)}</svg>'


def _values(stats: Mapping[str, Any] | None) -> list[str]:
    if not stats:
        return ["<td></td>"] * 5
    numbers = [
        f'<td class="number">{stats[name]:.4g}</td>' if stats[name] is not None else "<td></td>"
        for name in ("min", "max", "mean")
    ]
    return [
        *numbers,
        f'<td class="number">{stats["nan"] or ""}</td>',
        f"<td>{_bars(stats['bins'])}</td>",
    ]


def _bars(counts: Sequence[int]) -> str:
    most = max(counts, default=0)
    if not most:
        return ""
    bars = [
        f'<rect x="{8 * n}" y="{30 - 30 * count / most:.1f}" width="7"'
        f' height="{30 * count / most:.1f}"/>'
        for n, count in enumerate(counts)
    ]
    label = f"histogram: {', '.join(map(str, counts))}"
    return (
        f'<svg class="bars" width="{8 * len(counts)}" height="30" role="img"'
        f' aria-label="{label}">{"".join(bars)}</svg>'
    )


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"

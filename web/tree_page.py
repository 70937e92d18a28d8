"""A checkpoint as a page: a treemap of its sizes, and a table of its leaves. Pure.

Each leaf has its shape, its shards and, where they were counted, its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .treemap import Rectangle, squarify

PLACE = Rectangle(0.0, 0.0, 1000.0, 420.0)
MOST_CELLS = 1000
"""Leaves in the treemap; what is smaller is one cell."""
_MOST_LINES = 32  # of one picture of shards
_COLOURS = 8
_LABEL_WIDTH = 70
_LABEL_HEIGHT = 16
_SHARDS_WIDTH = 60
_SHARDS_HEIGHT = 40
_BAR_WIDTH = 8
_BARS_HEIGHT = 30
_STYLE = (Path(__file__).parent / "page" / "tree.css").read_text(encoding="utf-8")


def checkpoint_page(shown: Mapping[str, Any]) -> str:
    """Returns a checkpoint, as `holdfast show --json` has it, as a page that needs nothing else."""
    arrays = [leaf for leaf in shown["leaves"] if leaf.get("bytes") is not None]
    total = sum(leaf["bytes"] for leaf in arrays)
    step = f"step {shown['step']} of " if shown["step"] is not None else ""
    title = escape(f"{step}{shown['path']} ({shown['layout']})")
    facts = [
        f"<p>{name}: {escape(str(shown[name]))}</p>"
        for name in ("metrics", "metadata")
        if shown[name]
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{_STYLE}</style></head>",
        f"<body><main><h1>{title}</h1>",
        f"<p>{len(shown['leaves'])} leaves, {_size(total)}</p>",
        *facts,
        f"<h2>Sizes</h2>{_treemap(arrays)}",
        f"<h2>Leaves</h2>{_table(shown['leaves'])}",
        "</main></body></html>\n",
    ]
    return "".join(parts)


def _treemap(arrays: Sequence[Mapping[str, Any]]) -> str:
    sizes = _labelled_sizes(arrays)
    places = squarify([size for _, size in sizes], PLACE)
    groups = dict.fromkeys(_group(label) for label, _ in sizes)
    numbers = {group: number for number, group in enumerate(groups)}
    cells = [
        _cell(place, label, size, numbers[_group(label)])
        for place, (label, size) in zip(places, sizes, strict=True)
    ]
    box = f"0 0 {PLACE.width:.0f} {PLACE.height:.0f}"
    label = "Sizes of the leaves; the table below says them"
    cells_text = "".join(cells)
    return f'<svg class="map" viewBox="{box}" role="img" aria-label="{label}">{cells_text}</svg>'


def _labelled_sizes(arrays: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Returns a label and a size for each cell, the largest first."""
    sizes = [(f"{leaf['item']}/{leaf['path']}", leaf["bytes"]) for leaf in arrays if leaf["bytes"]]
    sizes.sort(key=lambda labelled: -labelled[1])
    rest = sizes[MOST_CELLS:]
    if rest:
        together = (f"{len(rest)} smaller leaves", sum(size for _, size in rest))
        sizes = sorted([*sizes[:MOST_CELLS], together], key=lambda labelled: -labelled[1])
    return sizes


def _group(label: str) -> str:
    """Returns what leaves of one colour share: all but the last part of their path."""
    return label.rpartition(".")[0]


def _cell(place: Rectangle, label: str, size: int, group: int) -> str:
    hue = group % _COLOURS * (360 // _COLOURS)
    box = (
        f'x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}"'
    )
    text = ""
    if place.width > _LABEL_WIDTH and place.height > _LABEL_HEIGHT:
        name = label.rpartition("/")[2]
        most = int((place.width - 8) / 7)
        at = f'x="{place.x + 4:.1f}" y="{place.y + 14:.1f}"'
        text = f"<text {at}>{escape(name[-most:])}</text>"
    title = f"{escape(label)}: {_size(size)}"
    return f'<g><title>{title}</title><rect {box} fill="hsl({hue} 60% 75%)"/>{text}</g>'


def _table(leaves: Sequence[Mapping[str, Any]]) -> str:
    counted = any(leaf.get("stats") for leaf in leaves)
    columns = ["item", "path", "type", "shape", "size", "sharding"]
    if counted:
        columns += ["min", "max", "mean", "NaN", "values"]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "".join(_row(leaf, counted) for leaf in leaves)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


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
    """Returns a picture of an array that is cut along up to two dimensions; "" for a whole one."""
    cuts = [count for count in counts if count > 1]
    if not cuts:
        return ""
    label = " by ".join(map(str, cuts))
    down, across, *_ = [min(count, _MOST_LINES) for count in cuts] + [1]
    lines = [
        f'<path d="M0 {_SHARDS_HEIGHT * n / down:.1f}H{_SHARDS_WIDTH}"/>' for n in range(1, down)
    ]
    lines += [
        f'<path d="M{_SHARDS_WIDTH * n / across:.1f} 0V{_SHARDS_HEIGHT}"/>'
        for n in range(1, across)
    ]
    box = f'width="{_SHARDS_WIDTH}" height="{_SHARDS_HEIGHT}"'
    head = f'<svg class="shards" {box} role="img" aria-label="{label} shards">'
    return f"{head}<rect {box}/>{''.join(lines)}</svg>"


def _values(stats: Mapping[str, Any] | None) -> list[str]:
    if not stats:
        return ["<td></td>"] * 5
    texts = ["" if stats[name] is None else f"{stats[name]:.4g}" for name in ("min", "max", "mean")]
    texts.append(str(stats["nan"] or ""))
    cells = [f'<td class="number">{text}</td>' for text in texts]
    return [*cells, f"<td>{_bars(stats['bins'])}</td>"]


def _bars(counts: Sequence[int]) -> str:
    most = max(counts, default=0)
    if not most:
        return ""
    bars = [_bar(n, _BARS_HEIGHT * count / most) for n, count in enumerate(counts)]
    box = f'width="{_BAR_WIDTH * len(counts)}" height="{_BARS_HEIGHT}"'
    label = f"histogram: {', '.join(map(str, counts))}"
    return f'<svg class="bars" {box} role="img" aria-label="{label}">{"".join(bars)}</svg>'


def _bar(number: int, height: float) -> str:
    at = f'x="{_BAR_WIDTH * number}" y="{_BARS_HEIGHT - height:.1f}"'
    return f'<rect {at} width="{_BAR_WIDTH - 1}" height="{height:.1f}"/>'


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"

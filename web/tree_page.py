"""A checkpoint as a page: a treemap of its sizes, and a table of its leaves. Pure.

The treemap is nested as the checkpoint is: items, branches, leaves. Nothing in the page runs: what
colours the treemap is chosen by radio buttons and the style alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from holdfast.coordination.diagnosis.summary import counted

from .size_tree import Box, Node, boxes, size_tree
from .treemap import Rectangle

PLACES = {"broad": Rectangle(0.0, 0.0, 1160.0, 600.0), "narrow": Rectangle(0.0, 0.0, 360.0, 620.0)}
"""The treemap is drawn twice, and the style shows one: for screens, and for phones."""
MOST_CELLS = 1000
"""Leaves in the treemap; of each branch those that are smaller are one cell."""
_MOST_LINES = 32  # of one picture of shards
_COLOURS = 6  # of dtypes; the rarer ones share the last
_CHANGES = ("unchanged", "up to a third", "up to two thirds", "more", "all")
_NAME_WIDTH = 18
_SIZE_WIDTH = 64
_BOTH_WIDTH = 110
_LINE_HEIGHT = 16
_SHARDS_WIDTH = 60
_SHARDS_HEIGHT = 40
_BAR_WIDTH = 8
_BARS_HEIGHT = 30
_STYLE = (Path(__file__).parent / "page" / "tree.css").read_text(encoding="utf-8")


def checkpoint_page(shown: Mapping[str, Any]) -> str:
    """Returns a checkpoint, as `holdfast show --json` has it, as a page that needs nothing else."""
    arrays = [leaf for leaf in shown["leaves"] if leaf.get("bytes") is not None]
    step = f"step {shown['step']} of " if shown["step"] is not None else ""
    title = escape(f"{step}{shown['path']} ({shown['layout']})")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head>",
        f"<body><main><h1>{title}</h1>",
        _facts(shown, arrays),
        f"<h2>Sizes</h2>{_treemap(arrays, shown.get('since'))}",
        f"<h2>Leaves</h2>{_tables(shown['leaves'])}",
        "</main></body></html>\n",
    ]
    return "".join(parts)


def _facts(shown: Mapping[str, Any], arrays: Sequence[Mapping[str, Any]]) -> str:
    total = sum(leaf["bytes"] for leaf in arrays)
    facts = {"arrays": f"{counted(len(shown['leaves']), 'leaf', 'leaves')}, {decimal(total)}"}
    for name in ("metrics", "metadata"):
        if shown[name]:
            facts[name] = _fact(shown[name])
    pairs = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{pairs}</dl>"


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


# --- The treemap


def _treemap(arrays: Sequence[Mapping[str, Any]], since: int | None) -> str:
    tree = size_tree(arrays, MOST_CELLS)
    if not tree.nbytes:
        return "<p>There is no array in it.</p>"
    sizes: Counter[str] = Counter()
    for leaf in arrays:
        sizes[leaf["dtype"]] += leaf["bytes"]
    numbers = {
        dtype: min(number, _COLOURS - 1) for number, (dtype, _) in enumerate(sizes.most_common())
    }
    by_dtype = "".join(
        _key(f"d{number}", f"{dtype} {decimal(sizes[dtype])}") for dtype, number in numbers.items()
    )
    parts = [f'<p class="legend by-dtype">{by_dtype}</p>']
    if since is not None:
        parts.insert(0, _choice(since))
        by_change = "".join(_key(f"c{n}", text) for n, text in enumerate(_CHANGES))
        parts.append(f'<p class="legend by-change">{by_change}</p>')
    parts += [_map(name, place, tree, numbers) for name, place in PLACES.items()]
    return "".join(parts)


def _choice(since: int) -> str:
    """Returns the buttons that choose what the colours mean."""
    return (
        "<fieldset><legend>Colours</legend>"
        '<label><input type="radio" name="colours" id="by-dtype" checked> dtype</label>'
        '<label><input type="radio" name="colours" id="by-change">'
        f" share that has changed since step {since}</label></fieldset>"
    )


def _key(colour: str, text: str) -> str:
    return f'<span class="entry"><span class="key {colour}"></span>{escape(text)}</span>'


def _map(name: str, place: Rectangle, tree: Node, numbers: Mapping[str, int]) -> str:
    label = "Sizes of the leaves, nested by item and path; the table below says them"
    cells = "".join(_box(box, place.width, numbers) for box in boxes(tree, place))
    height = f"height:{place.height:.0f}px"
    return f'<div class="map {name}" role="img" aria-label="{label}" style="{height}">{cells}</div>'


def _box(box: Box, width: float, numbers: Mapping[str, int]) -> str:
    """Returns a branch or a cell; its width follows the screen's, its height does not."""
    node, place, opened = box
    style = (
        f"left:{100 * place.x / width:.2f}%;top:{place.y:.1f}px;"
        f"width:{100 * place.width / width:.2f}%;height:{place.height:.1f}px"
    )
    shape = "branch" if opened else f"cell {_colours(node, numbers)}"
    return f'<div class="{shape}" title="{_words(node)}" style="{style}">{_label(box)}</div>'


def _label(box: Box) -> str:
    """Returns what stands in a branch's header or in a cell: what fits of its name and size."""
    node, place, opened = box
    if place.width < _NAME_WIDTH or place.height < _LINE_HEIGHT:
        return ""
    label = escape(node.name)
    if opened and place.width >= _BOTH_WIDTH:
        label += f" <i>{decimal(node.nbytes)}</i>"
    if not opened and place.width >= _SIZE_WIDTH and place.height >= 2 * _LINE_HEIGHT:
        label += f"<br><i>{decimal(node.nbytes)}</i>"
    return label


def _colours(node: Node, numbers: Mapping[str, int]) -> str:
    by_dtype = f"d{numbers[node.dtype]}" if node.dtype else "mixed"
    if node.changed is None:
        return by_dtype
    return f"{by_dtype} c{_change(node.changed)}"


def _change(share: float) -> int:
    """Returns which of `_CHANGES` a share is."""
    if share >= 1:
        return len(_CHANGES) - 1
    return math.ceil(3 * share)


def _words(node: Node) -> str:
    """Returns what a pointer at a node reads."""
    facts = [f"{node.path}: {decimal(node.nbytes)}", node.fact]
    if node.count > 1:
        facts.append(f"{node.count} leaves")
    if node.changed is not None:
        facts.append(f"{_percent(node.changed)} changed")
    return escape(", ".join(fact for fact in facts if fact))


# --- The table


def _tables(leaves: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table for each item."""
    by_item: dict[str, list[Mapping[str, Any]]] = {}
    for leaf in leaves:
        by_item.setdefault(leaf["item"], []).append(leaf)
    return "".join(_table(item, its) for item, its in by_item.items())


def _table(item: str, leaves: Sequence[Mapping[str, Any]]) -> str:
    columns = ["path", "type", "shape", "size", "sharding"]
    if any("changed" in leaf for leaf in leaves):
        columns.append("changed")
    if any(leaf.get("stats") for leaf in leaves):
        columns += ["min", "max", "mean", "NaN", "values"]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "".join(_row(leaf, columns) for leaf in leaves)
    name = escape(item)
    region = f'<div class="wide" tabindex="0" role="region" aria-label="Leaves of {name}">'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<h3>{name}</h3>{region}{table}</div>"


def _row(leaf: Mapping[str, Any], columns: Sequence[str]) -> str:
    path = f'<th scope="row">{escape(leaf["path"]) or "(the whole item)"}</th>'
    cells = [path, f"<td>{escape(leaf['dtype'])}</td>"]
    if leaf.get("bytes") is None:
        cells.append(f'<td colspan="3">{escape(repr(leaf.get("value"))[:200])}</td>')
    else:
        cells.append(f"<td>{escape(str(leaf['shape']))}</td>")
        cells.append(f'<td class="number">{decimal(leaf["bytes"])}</td>')
        cells.append(f"<td>{_shards(leaf.get('shards') or [])} {escape(leaf['sharding'])}</td>")
    if "changed" in columns:
        changed = leaf.get("changed")
        cells.append(f'<td class="number">{"" if changed is None else _percent(changed)}</td>')
    if "values" in columns:
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


def _percent(share: float) -> str:
    """Returns a share for people: what is not all, or not nothing, is not rounded to that."""
    if 0 < share < 0.01:
        return "under 1 %"
    return f"{math.floor(100 * share)} %"

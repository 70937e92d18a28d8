"""`holdfast show PATH`: what is in a checkpoint, of any layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from holdfast.coordination.diagnosis.summary import counted, printable

from .common import (
    EXIT_NOTHING,
    Failure,
    flag,
    folder_argument,
    json_option,
    print_json,
    progress_bar,
    say,
    sentences,
    shown_time,
)
from .layers import fold_layers
from .tables import Table, console

if TYPE_CHECKING:
    from holdfast.checkpoint.format.record import LeafRecord
    from holdfast.checkpoint.layouts.base import CheckpointReader

_BARS = "·▁▂▃▄▅▆▇█"
_NUMBERS = ("min", "max", "mean")
BINS = 12
_MOST_OF_A_VALUE = 60  # characters of a leaf's
_MOST_OF_JSON = 2000  # characters of an item's
_LEAST_SHARE = 0.001
_OF_PROCESS = re.compile(r"^process \d+: ")  # before the path of what each process keeps


@click.command(
    epilog="""\b
Examples:
  holdfast show /ckpt/run7                         the latest step
  holdfast show /ckpt/run7 --step 1000 --path params.dense
  holdfast show /ckpt/run7 --unfold                each layer by itself
  holdfast show /orbax/run7/1000 --stats           Orbax's and safetensors too
  holdfast show /ckpt/run7 --since 1000 --html run7.html

Exit codes: 0 shown, 3 nothing there, 4 damaged, 5 could not be read."""
)
@folder_argument("path")
@click.option("--step", type=int, help="Show this step of a root.")
@click.option("--item", help="Show this item alone.")
@click.option("--path", "under", default="", help="Show the leaves below this path alone.")
@flag("--stats", help="Read the arrays: min, max, mean, NaNs and a histogram of each.")
@flag("--unfold", help="Show each leaf: repeated layers of one shape are one line else.")
@flag("--verify", "check", help="Read every byte and check it, too.")
@click.option(
    "--since",
    type=int,
    help="Read this step too, and say which share of each leaf has changed since.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page there: a treemap of the sizes by dtype or change, and the leaves.",
)
@json_option
def show(path: str, *, page: Path | None, as_json: bool, **options: Any) -> None:
    """Show the tree of the checkpoint in PATH (of a root of steps: the latest) and its totals."""
    from .roots import open_measured

    chosen = _Chosen(**options)
    with sentences(), progress_bar("reading") as meter:
        readings = chosen.stats + chosen.check + (chosen.since is not None)
        checkpoint = open_measured(path, chosen.step, meter, readings=readings)
        rows = list(_rows(checkpoint, chosen))
        if chosen.since is not None:
            rows = _with_changes(rows, open_measured(path, chosen.since, meter), checkpoint)
        if chosen.check:
            checkpoint.verify()
    if chosen.under and not rows:
        raise Failure(f"{checkpoint.info.path} has no leaf below '{chosen.under}'", EXIT_NOTHING)
    shown = _as_json(checkpoint, rows, chosen)
    if page is not None:
        _write_page(page, shown)
    if as_json:
        print_json(shown)
    else:
        _print(checkpoint, rows, chosen)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What of a checkpoint is shown; each field is an option."""

    step: int | None
    item: str | None
    under: str
    stats: bool
    unfold: bool
    check: bool
    since: int | None

    @property
    def folds(self) -> bool:
        """Whether repeated layers are one line; each array has statistics of its own."""
        return not (self.unfold or self.stats)


def _rows(checkpoint: CheckpointReader, chosen: _Chosen) -> Iterator[dict[str, Any]]:
    from holdfast.checkpoint.layouts.base import find_named, leaves_below

    only = chosen.item
    if only is not None:
        find_named(checkpoint.info, checkpoint.info.items, only)
    for name, kind in checkpoint.info.items.items():
        if only not in (None, name) or kind == "files":
            continue
        if kind == "json":
            if not chosen.under:
                yield {"item": name, "path": "", "dtype": "json", "value": checkpoint.json(name)}
            continue
        leaves = leaves_below(checkpoint.item(name), chosen.under)
        found = dict(_statistics(checkpoint, name, leaves)) if chosen.stats else {}
        for leaf in leaves:
            yield _leaf_row(name, leaf, found.get(leaf.path))


def _leaf_row(item: str, leaf: LeafRecord, stats: dict[str, Any] | None) -> dict[str, Any]:
    from holdfast.checkpoint.arrays.sharding import show_sharding
    from holdfast.checkpoint.restoring.match import show_leaf

    if leaf.grid is None:
        return {"item": item, "path": leaf.path, "dtype": leaf.kind, "value": leaf.value}
    shape = leaf.shape[:-1] if leaf.kind == "key" else leaf.shape
    return {
        "item": item,
        "path": leaf.path,
        "dtype": show_leaf(leaf).partition("[")[0],
        "shape": list(shape),
        "bytes": leaf.nbytes,
        "sharding": show_sharding(leaf.sharding),
        "shards": _shards(leaf.sharding),
        "stats": stats,
    }


def _shards(description: Any) -> list[int] | None:
    """Returns into how many parts each dimension is cut, None for an array that is not."""
    if not description or not any(description.get("spec", ())):
        return None
    sizes = dict(zip(description["axes"], description["sizes"], strict=True))
    return [math.prod(sizes[axis] for axis in axes) for axes in description["spec"]]


def _with_changes(
    rows: list[dict[str, Any]], before: CheckpointReader, now: CheckpointReader
) -> list[dict[str, Any]]:
    """Returns the rows with the share of their elements that differ from those of `before`."""
    from holdfast.checkpoint.tools.diff import compare

    shares: dict[tuple[str, str], float] = {}
    for found in compare(now, before):  # by the names of the first, which are those of the rows
        leaf = (found.item, _OF_PROCESS.sub("", found.path))
        share = found.count / found.size if found.size else 1.0
        shares[leaf] = max(share, shares.get(leaf, 0.0))
    return [row | {"changed": _share_of(row, shares)} for row in rows]


def _share_of(row: dict[str, Any], shares: dict[tuple[str, str], float]) -> float:
    """Returns the share of a leaf; an item that is new as a whole has one for all of it."""
    of_leaf = shares.get((row["item"], row["path"]), 0.0)
    return max(of_leaf, shares.get((row["item"], ""), 0.0))


def _write_page(file: Path, shown: dict[str, Any]) -> None:
    from holdfast.web.tree_page import checkpoint_page

    try:
        file.write_text(checkpoint_page(shown), encoding="utf-8")
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}") from None


def _statistics(
    checkpoint: CheckpointReader, item: str, leaves: list[LeafRecord]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the statistics of each array, read a few at a time."""
    from holdfast.checkpoint.layouts.base import read_leaves

    arrays = [leaf for leaf in leaves if leaf.grid is not None]
    for leaf, array in read_leaves(checkpoint.reader(item), arrays):
        yield leaf.path, statistics(array)


def statistics(array: Any) -> dict[str, Any]:
    """Returns what there is to say of an array's values.

    That is min, max, mean, the number of NaNs and of infinities, and the counts of a small
    histogram of the finite values.
    """
    import numpy as np

    flat = np.asarray(array).reshape(-1)
    values = np.abs(flat).astype(np.float64) if flat.dtype.kind == "c" else flat.astype(np.float64)
    finite = values[np.isfinite(values)]
    nans = int(np.isnan(values).sum())
    stats: dict[str, Any] = {
        "nan": nans,
        "inf": int(values.size - finite.size) - nans,
        "min": None,
        "max": None,
        "mean": None,
        "bins": [],
    }
    if finite.size:
        low = float(finite.min())
        high = float(finite.max())
        stats |= {"min": low, "max": high, "mean": float(finite.mean())}
        if low < high:
            # Scaled first: the span of the largest floats is no float.
            most = max(abs(low), abs(high))
            span = high / most - low / most
            scaled = (finite / most - low / most) / (span or 1.0)
            stats["bins"] = np.histogram(scaled, BINS, range=(0.0, 1.0))[0].tolist()
    return stats


def bars(counts: list[int]) -> str:
    """Returns counts as a row of blocks."""
    most = max(counts, default=0)
    heights = [1 + count * (len(_BARS) - 2) // most if count else 0 for count in counts]
    return "".join(_BARS[height] for height in heights)


def _print(checkpoint: CheckpointReader, rows: list[dict[str, Any]], chosen: _Chosen) -> None:
    from holdfast.checkpoint.restoring.match import listed

    info = checkpoint.info
    when = f", saved {shown_time(info.finished_s)}" if info.finished_s else ""
    step = f"step {info.step} of " if info.step is not None else ""
    say(f"{step}{info.path} ({info.layout}){when}")
    for name, kind in info.items.items():
        of_item = [row for row in rows if row["item"] == name]
        if of_item:
            _print_item(name, kind, _folded(of_item) if chosen.folds else of_item, chosen.stats)
        elif kind == "files" and chosen.item in (None, name) and not chosen.under:
            say(f"\n{name} (files): {listed([file for file, _ in checkpoint.files(name)])}")
    say("")
    for label, facts in (("metrics", info.metrics), ("metadata", info.metadata)):
        if facts:
            click.echo(printable(f"{label}: {facts}"))
    leaves = [row for row in rows if row["dtype"] != "json"]
    size = decimal(sum(row.get("bytes", 0) for row in leaves))
    say(f"{counted(len(leaves), 'leaf', 'leaves')}, {size} of arrays")
    if chosen.check and info.layout == "holdfast":
        say("every byte is as it was written")
    elif chosen.check:
        say("everything can be read; this layout has no checksums")


def _print_item(name: str, kind: str, rows: list[dict[str, Any]], stats: bool) -> None:
    shardings = {row["sharding"] for row in rows if row.get("sharding")}
    # Mostly all arrays have one sharding: then it is no column.
    everywhere = f", sharding of each array: {min(shardings)}" if len(shardings) == 1 else ""
    say(f"\n{name} ({kind}){everywhere}")
    if kind != "json":
        console().print(_table(rows, stats, with_sharding=len(shardings) > 1))
        return
    for row in rows:
        text = json.dumps(row["value"], default=str)
        more = "... (--json shows all)" if len(text) > _MOST_OF_JSON else ""
        say(f"{text[:_MOST_OF_JSON]}{more}")


def _folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with those of repeated layers as one, which says how many it stands for.

    Its size is that of all together.
    """
    by_path = {row["path"]: row for row in rows}
    alike = {path: _common(row) for path, row in by_path.items()}
    folded = []
    for fold in fold_layers(alike):
        row = by_path[fold.members[0]]
        count = len(fold.members)
        if count > 1:
            size = sum(by_path[path].get("bytes", 0) for path in fold.members)
            row = row | {"path": f"{fold.path} x{count}", "bytes": size}
        folded.append(row)
    return folded


def _common(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns what the leaves of repeated layers have in common."""
    facts = ("dtype", "shape", "value", "sharding", "changed")
    return tuple(repr(row.get(fact)) for fact in facts)


def _table(rows: list[dict[str, Any]], stats: bool, *, with_sharding: bool) -> Table:
    """Returns the leaves as a table; a column that none of them has is left out."""
    cells = [_cells(row, stats) for row in rows]
    titles = [title for title in cells[0] if any(each[title] for each in cells)]
    if not with_sharding:
        titles = [title for title in titles if title != "sharding"]
    table = Table(
        titles,
        folds=[
            "sharding",
            "value",
            "NaN",
            "histogram",
            "mean",
            "max",
            "min",
            "dtype",
            "size",
            "shape",
            "changed",
        ],
        numbers=["size", "changed", *_NUMBERS, "NaN"],
    )
    for each in cells:
        table.add(*(each[title] for title in titles))
    return table


def _cells(row: dict[str, Any], stats: bool) -> dict[str, str]:
    """Returns what there is to show of a leaf, by title; "" for what it does not have."""
    is_array = "shape" in row
    cells = {
        "path": row["path"],
        "shape": str(row["shape"]) if is_array else "",
        "dtype": row["dtype"],
        "size": decimal(row["bytes"]) if is_array else "",
        "value": "" if is_array else repr(row["value"])[:_MOST_OF_A_VALUE],
        "changed": _percent(row["changed"]) if "changed" in row else "",
    }
    if stats:
        return cells | _stat_cells(row.get("stats"))
    return cells | {"sharding": row.get("sharding", "")}


def _percent(share: float) -> str:
    """Returns a share for people: a small one is not nothing, and a large one is not all."""
    if 0 < share < _LEAST_SHARE:
        return "<0.1%"
    return f"{math.floor(1000 * share) / 10:g}%"


def _stat_cells(stats: dict[str, Any] | None) -> dict[str, str]:
    if stats is None:
        return dict.fromkeys([*_NUMBERS, "NaN", "histogram"], "")
    numbers = {name: "" if stats[name] is None else f"{stats[name]:.4g}" for name in _NUMBERS}
    return numbers | {"NaN": str(stats["nan"] or ""), "histogram": bars(stats["bins"])}


def _as_json(
    checkpoint: CheckpointReader, rows: list[dict[str, Any]], chosen: _Chosen
) -> dict[str, Any]:
    info = checkpoint.info
    leaves = [{key: value for key, value in row.items() if value is not None} for row in rows]
    return {
        "path": info.path,
        "layout": info.layout,
        "step": info.step,
        "saved_s": info.finished_s,
        "items": dict(info.items),
        "metrics": dict(info.metrics),
        "metadata": info.metadata,
        "leaves": leaves,
        "verified": chosen.check,
        "since": chosen.since,
    }

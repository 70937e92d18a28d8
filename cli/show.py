"""`holdfast show PATH`: what is in a checkpoint, of any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .common import (
    EXIT_NOTHING,
    Failure,
    console,
    json_option,
    open_measured,
    print_json,
    progress_bar,
    sentences,
    shown_time,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.format.record import LeafRecord
    from holdfast.checkpoint.layouts.base import CheckpointReader

_BARS = " ▁▂▃▄▅▆▇█"
_NUMBERS = ("min", "max", "mean")
BINS = 12


@click.command(
    epilog="""\b
Examples:
  holdfast show /ckpt/run7                         the latest step
  holdfast show /ckpt/run7 --step 1000 --path params.dense
  holdfast show /orbax/run7/1000 --stats           Orbax's checkpoints too, and safetensors
  holdfast show /ckpt/run7 --stats --html run7.html

Exit codes: 0 shown, 3 nothing there, 4 damaged, 5 could not be read."""
)
@click.argument("path")
@click.option("--step", type=int, default=None, help="Show this step of a root.")
@click.option("--item", default=None, help="Show this item alone.")
@click.option("--path", "under", default="", help="Show the leaves below this path alone.")
@click.option(
    "--stats", is_flag=True, help="Read the arrays: min, max, mean, NaNs and a histogram of each."
)
@click.option("--verify", "check", is_flag=True, help="Read every byte and check it, too.")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page there: a treemap of the sizes, and the leaves.",
)
@json_option
def show(  # each option is a parameter, as click has it
    path: str,
    step: int | None,
    item: str | None,
    under: str,
    stats: bool,
    check: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Show the tree of the checkpoint in PATH (of a root of steps: the latest) and its totals."""
    from holdfast.checkpoint.layouts.base import total_bytes

    with sentences(), progress_bar("reading") as meter:
        checkpoint = open_measured(path, step, meter)
        meter.expect(total_bytes(checkpoint) * (stats + check))
        rows = list(_rows(checkpoint, item, under, stats))
        if check:
            checkpoint.verify()
    if under and not rows:
        raise Failure(f"{checkpoint.info.path} has no leaf below '{under}'", EXIT_NOTHING)
    if page is not None:
        _write_page(page, _as_json(checkpoint, rows, check))
    if as_json:
        print_json(_as_json(checkpoint, rows, check))
    else:
        _print(checkpoint, rows, stats, check)


def _rows(
    checkpoint: CheckpointReader, only: str | None, under: str, stats: bool
) -> Iterator[dict[str, Any]]:
    from holdfast.checkpoint.layouts.base import find_named, leaves_below

    if only is not None:
        find_named(checkpoint.info, checkpoint.info.items, only)
    for name, kind in checkpoint.info.items.items():
        if only not in (None, name) or kind == "files":
            continue
        if kind == "json":
            if not under:
                yield {"item": name, "path": "", "dtype": "json", "value": checkpoint.json(name)}
            continue
        leaves = leaves_below(checkpoint.item(name), under)
        counted = dict(_statistics(checkpoint, name, leaves)) if stats else {}
        for leaf in leaves:
            yield _leaf_row(name, leaf, counted.get(leaf.path))


def _leaf_row(item: str, leaf: LeafRecord, stats: dict[str, Any] | None) -> dict[str, Any]:
    from holdfast.checkpoint.format.sharding import show_sharding
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
            scaled = finite / max(abs(low), abs(high))
            stats["bins"] = np.histogram(scaled, BINS)[0].tolist()
    return stats


def bars(counts: list[int]) -> str:
    """Returns counts as a row of blocks."""
    most = max(counts, default=0)
    heights = [1 + count * (len(_BARS) - 2) // most if count else 0 for count in counts]
    return "".join(_BARS[height] for height in heights)


def _print(
    checkpoint: CheckpointReader, rows: list[dict[str, Any]], stats: bool, check: bool
) -> None:
    info = checkpoint.info
    out = console()
    when = f", saved {shown_time(info.finished_s)}" if info.finished_s else ""
    step = f"step {info.step} of " if info.step is not None else ""
    out.print(f"{step}{escape(info.path)} ({info.layout}){when}")
    for name, kind in info.items.items():
        of_item = [row for row in rows if row["item"] == name]
        if of_item:
            out.print(_table(name, kind, of_item, stats))
    for label, facts in (("metrics", info.metrics), ("metadata", info.metadata)):
        if facts:
            out.print(f"{label}: {escape(str(facts))}")
    leaves = [row for row in rows if row["dtype"] != "json"]
    out.print(f"{len(leaves)} leaves, {decimal(sum(row.get('bytes', 0) for row in leaves))}")
    if check and info.layout == "holdfast":
        out.print("every byte is as it was written")
    elif check:
        out.print("everything can be read; this layout has no checksums")


def _table(name: str, kind: str, rows: list[dict[str, Any]], stats: bool) -> Table:
    table = Table(title=f"{name} ({kind})", title_justify="left")
    columns = ["path", "shape", "dtype", "size"]
    columns += ["min", "max", "mean", "NaN", "histogram"] if stats else ["sharding"]
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in ("size", "min", "max", "mean", "NaN") else "left",
            overflow="fold",
            no_wrap=column not in ("path", "sharding"),
        )
    for row in rows:
        table.add_row(*_cells(row, stats))
    return table


def _cells(row: dict[str, Any], stats: bool) -> list[str]:
    path = escape(row["path"])
    if "value" in row:
        value = escape(repr(row["value"])[:60])
        return [path, value, row["dtype"]] if stats else [path, "", row["dtype"], "", value]
    cells = [path, escape(str(row["shape"])), row["dtype"], decimal(row["bytes"])]
    return cells + (_stat_cells(row["stats"]) if stats else [escape(row["sharding"])])


def _stat_cells(stats: dict[str, Any]) -> list[str]:
    numbers = ["" if stats[name] is None else f"{stats[name]:.4g}" for name in _NUMBERS]
    return [*numbers, str(stats["nan"] or ""), bars(stats["bins"])]


def _as_json(
    checkpoint: CheckpointReader, rows: list[dict[str, Any]], check: bool
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
        "verified": check,
    }

"""`holdfast ls ROOT`: the steps of a root."""

from __future__ import annotations

from typing import Any

import click
from rich.filesize import decimal
from rich.text import Text

from .common import (
    folder_argument,
    json_option,
    local_option,
    print_json,
    progress_bar,
    say,
    sentences,
    shown_time,
)
from .tables import Table, console

_COLOURS = {
    "damaged": "red",
    "unreadable": "red",
    "dead": "red",
    "unfinished": "yellow",
    "left behind": "yellow",
}


@click.command(
    epilog="""\b
Examples:
  holdfast ls /ckpt/run7
  holdfast ls gs://bucket/run7 --json
  holdfast ls /ckpt/run7 --local /dev/shm/ckpt    with local steps

Exit codes: 0 listed (also when a step is damaged), 3 nothing there, 5 could not be read."""
)
@folder_argument("root")
@local_option("too")
@json_option
def ls(root: str, local: str | None, as_json: bool) -> None:
    """List the steps of ROOT: sizes, times, metrics, and what was begun and never finished."""
    with sentences(), progress_bar("listing", counts=False):
        from .listing import list_root

        rows, beside = list_root(root, local)
    if as_json:
        print_json({"root": root, "steps": rows, "beside": beside})
        return
    say(root)
    console().print(_table(rows))
    notes = [f"{row['name']}: {row['note']}" for row in rows if row["note"]]
    notes += [
        f"{name}: a checkpoint ({layout}), but no step of this root; open it by its own path"
        for name, layout in beside.items()
    ]
    for line in ["", *notes] if notes else []:
        say(line)


def _table(rows: list[dict[str, Any]]) -> Table:
    # Steps of incremental saves share files: the deletion of one frees less than its size.
    shares = any(row["frees_bytes"] != row["bytes"] for row in rows)
    titles = ["step", "state", "layout", "saved", "on disk", "frees", "items", "metrics"]
    if not shares:
        titles.remove("frees")
    table = Table(
        titles,
        folds=["items", "layout", "frees", "metrics", "saved", "on disk", "state"],
        numbers=["step", "on disk", "frees"],
    )
    for row in rows:
        table.add(*_cells(row, shares))
    return table


def _cells(row: dict[str, Any], shares: bool) -> list[str | Text]:
    sizes = [decimal(row["bytes"])]
    if shares:
        sizes.append(decimal(row["frees_bytes"]))
    metrics = [
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row["metrics"].items()
    ]
    return [
        str(row["name"]),
        Text(row["state"], style=_COLOURS.get(row["state"], "")),
        row["layout"],
        shown_time(row["saved_s"])[:-3],
        *sizes,
        ", ".join(row["items"]),
        ", ".join(metrics),
    ]

"""`holdfast diff A B`: how two checkpoints differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from .common import (
    EXIT_DIFFERENT,
    console,
    json_option,
    open_measured,
    print_json,
    progress_bar,
    sentences,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.tools.diff import LeafDifference


@click.command(
    epilog="""\b
Examples:
  holdfast diff /ckpt/run7/1000 /ckpt/run7/2000
  holdfast diff /ckpt/run7 gs://bucket/run7        the latest step of each
  holdfast diff /ckpt/run7 /orbax/run7 --json      layouts may differ

Exit codes: 0 equal, 1 different, 3 nothing there, 4 damaged, 5 could not be read."""
)
@click.argument("a")
@click.argument("b")
@click.option("--step-a", type=int, default=None, help="Take this step of the root A.")
@click.option("--step-b", type=int, default=None, help="Take this step of the root B.")
@click.option(
    "--limit", type=int, default=50, show_default=True, help="Show at most so many leaves (0: all)."
)
@json_option
def diff(
    a: str, b: str, *, step_a: int | None, step_b: int | None, limit: int, as_json: bool
) -> None:
    """Compare the checkpoints A and B: structure, shapes, dtypes and values, bit by bit.

    For each leaf that differs: how many elements, and the largest absolute and relative difference
    among them.
    """
    from holdfast.checkpoint.layouts.base import total_bytes
    from holdfast.checkpoint.tools.diff import compare

    with sentences(), progress_bar("comparing") as meter:
        one = open_measured(a, step_a, meter)
        two = open_measured(b, step_b, meter)
        meter.expect(total_bytes(one) + total_bytes(two))
        differences = list(compare(one, two))
    if as_json:
        shown = [asdict(difference) for difference in differences]
        print_json({"a": one.info.path, "b": two.info.path, "differences": shown})
    elif not differences:
        click.echo(f"{one.info.path} and {two.info.path} are equal, bit by bit")
    else:
        title = f"A: {escape(one.info.path)}\nB: {escape(two.info.path)}"
        console().print(_table(title, differences[: limit or None]))
        differ = "leaf differs" if len(differences) == 1 else "leaves differ"
        more = f", {limit} shown" if 0 < limit < len(differences) else ""
        click.echo(f"{len(differences)} {differ}{more}")
    sys.exit(EXIT_DIFFERENT if differences else 0)


def _table(title: str, differences: Sequence[LeafDifference]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("leaf", "what", "A", "B"):
        table.add_column(column, overflow="fold")
    for column in ("differing", "max abs", "max rel"):
        table.add_column(column, overflow="fold", justify="right")
    for row in differences:
        name = f"{row.item}: {row.path}" if row.path else row.item
        numbers = ["", "", ""]
        if row.size:
            count = f"{row.count:,} of {row.size:,}"
            numbers = [count, f"{row.max_abs:.3g}", f"{row.max_rel:.3g}"]
        table.add_row(escape(name), row.what, escape(row.a), escape(row.b), *numbers)
    return table

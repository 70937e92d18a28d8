"""`holdfast diff A B`: how two checkpoints differ."""

from __future__ import annotations

import sys
from dataclasses import asdict

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
def diff(a: str, b: str, step_a: int | None, step_b: int | None, limit: int, as_json: bool) -> None:
    """Compare the checkpoints A and B: structure, shapes, dtypes and values, bit by bit.

    For each leaf that differs: how many elements, and the largest absolute and relative difference
    among them.
    """
    from holdfast.checkpoint.layouts.base import total_bytes
    from holdfast.checkpoint.tools.diff import compare

    with sentences(), progress_bar("comparing") as meter:
        one, two = open_measured(a, step_a, meter), open_measured(b, step_b, meter)
        meter.expect(total_bytes(one) + total_bytes(two))
        found = list(compare(one, two))
    if as_json:
        print_json(
            {
                "a": one.info.path,
                "b": two.info.path,
                "differences": [asdict(difference) for difference in found],
            }
        )
    elif not found:
        click.echo(f"{one.info.path} and {two.info.path} are equal, bit by bit")
    else:
        table = Table(
            title=f"A: {escape(one.info.path)}\nB: {escape(two.info.path)}", title_justify="left"
        )
        for column in ("leaf", "what", "A", "B", "differing", "max abs", "max rel"):
            table.add_column(
                column,
                overflow="fold",
                justify="right" if column in ("differing", "max abs", "max rel") else "left",
            )
        for row in found[: limit or None]:
            name = f"{row.item}: {row.path}" if row.path else row.item
            numbers = (
                (f"{row.count:,} of {row.size:,}", f"{row.max_abs:.3g}", f"{row.max_rel:.3g}")
                if row.size
                else ("", "", "")
            )
            table.add_row(escape(name), row.what, escape(row.a), escape(row.b), *numbers)
        console().print(table)
        click.echo(
            f"{len(found)} {'leaf differs' if len(found) == 1 else 'leaves differ'}"
            + (f", {limit} shown" if 0 < limit < len(found) else "")
        )
    sys.exit(EXIT_DIFFERENT if found else 0)

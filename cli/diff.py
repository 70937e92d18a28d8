"""`holdfast diff A B`: how two checkpoints differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .common import (
    EXIT_DIFFERENT,
    folder_argument,
    json_option,
    print_json,
    progress_bar,
    say,
    sentences,
)
from .tables import Table, console

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
@folder_argument("a")
@folder_argument("b")
@click.option("--step-a", type=int, help="Take this step of the root A.")
@click.option("--step-b", type=int, help="Take this step of the root B.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="Show at most so many leaves (0: all).",
)
@json_option
def diff(
    a: str, b: str, *, step_a: int | None, step_b: int | None, limit: int, as_json: bool
) -> None:
    """Compare the checkpoints A and B: structure, shapes, dtypes and values, bit by bit.

    For each leaf that differs: how many elements, and the largest absolute and relative difference
    among them. What is in one alone, or of another shape or type, comes first, then the leaves with
    NaNs or infinities in one alone, then the largest absolute difference.
    """
    from holdfast.checkpoint.tools.diff import by_size, compare

    from .roots import open_measured

    with sentences(), progress_bar("comparing") as meter:
        one = open_measured(a, step_a, meter)
        two = open_measured(b, step_b, meter)
        differences = sorted(compare(one, two), key=by_size)
    if as_json:
        shown = [asdict(difference) for difference in differences]
        print_json({"a": one.info.path, "b": two.info.path, "differences": shown})
    elif not differences:
        say(f"{one.info.path} and {two.info.path} are equal, bit by bit")
    else:
        say(f"A: {one.info.path}\nB: {two.info.path}")
        console().print(_table(differences[: limit or None]))
        differ = "leaf differs" if len(differences) == 1 else "leaves differ"
        more = ""
        if 0 < limit < len(differences):
            more = f", {limit} shown (--limit 0 shows all)"
        say(f"\n{len(differences)} {differ}{more}")
    sys.exit(EXIT_DIFFERENT if differences else 0)


def _table(differences: Sequence[LeafDifference]) -> Table:
    table = Table(
        ["leaf", "what", "max abs", "max rel", "differing", "A", "B"],
        folds=["B", "A", "differing", "max rel", "what", "max abs"],
        numbers=["max abs", "max rel", "differing"],
    )
    for row in differences:
        name = f"{row.item}: {row.path}" if row.path else row.item
        # Both have the same type where only values differ.
        b = "" if row.b == row.a else row.b
        table.add(name, row.what, *_numbers(row), row.a, b)
    return table


def _numbers(row: LeafDifference) -> tuple[str, str, str]:
    """Returns the largest differences and how many elements differ; "" for what is no number."""
    if not row.size:
        return "", "", ""
    differing = f"{row.count:,} of {row.size:,}"
    if row.not_finite:
        differing += f", {row.not_finite:,} NaN or inf"
    return f"{row.max_abs:.3g}", f"{row.max_rel:.3g}", differing

"""`holdfast show PATH`: what is in a checkpoint."""

from __future__ import annotations

import datetime

import click
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from holdfast.coordination import HoldfastError


@click.command()
@click.argument("path")
@click.option("--item", default=None, help="Show this item alone.")
@click.option("--verify", "check", is_flag=True, help="Read every byte and check it, too.")
def show(path: str, item: str | None, check: bool) -> None:
    """Show the tree of the checkpoint in PATH (of a root of steps: the latest) and its totals."""
    from holdfast.checkpoint import verify
    from holdfast.checkpoint._oneshot import open_checkpoint

    console = Console(soft_wrap=True)
    try:
        storage, _, record = open_checkpoint(path)
        chosen = record.items if item is None else {item: record.items[item]}
    except KeyError:
        raise click.ClickException(f"{record.path}: there is no item {item!r}; it has {sorted(record.items)}") from None
    except HoldfastError as error:
        raise click.ClickException(str(error)) from error
    when = datetime.datetime.fromtimestamp(record.finished_s).astimezone().isoformat(" ", "seconds")
    console.print(f"step {record.step} of {escape(storage.root)}, saved {when} by {record.processes} process(es)", highlight=False)
    for name, found in chosen.items():
        console.print(_table(name, found))
    for label, facts in (("metrics", record.metrics), ("metadata", record.metadata)):
        if facts:
            console.print(f"{label}: {escape(str(facts))}", highlight=False)
    files = [file for found in chosen.values() for file in found.files]
    leaves = [leaf for found in chosen.values() for leaf in found.leaves]
    total = sum(leaf.nbytes for leaf in leaves)
    console.print(f"{len(leaves)} leaves, {decimal(total)} in {len(files)} files of {decimal(sum(file.size for file in files))}")
    if check:
        try:
            verify(path)
        except HoldfastError as error:
            raise click.ClickException(str(error)) from error
        console.print("every byte is as it was written")


def _table(name: str, item: object) -> Table:
    from holdfast.checkpoint._engine import ItemRecord
    from holdfast.checkpoint._match import show_leaf, show_sharding

    assert isinstance(item, ItemRecord)
    table = Table(title=f"{name} ({item.kind})", title_justify="left")
    for column in ("path", "shape", "dtype", "size", "sharding"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for leaf in item.leaves:
        if leaf.grid is None:
            table.add_row(escape(leaf.path), "", leaf.kind, "", escape(repr(leaf.value)[:60]))
        else:
            shape = leaf.shape[:-1] if leaf.kind == "key" else leaf.shape
            dtype = show_leaf(leaf).partition("[")[0]
            table.add_row(escape(leaf.path), escape(str(list(shape))), dtype, decimal(leaf.nbytes), escape(show_sharding(leaf.sharding)))
    for file in item.files if item.kind == "json" else ():
        table.add_row(escape(file.name), "", "json", decimal(file.size), "")
    return table


__all__ = ["show"]

"""`holdfast convert SRC DST --to LAYOUT`: the same numbers in another layout."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from ._common import json_option, print_json, progress_bar, sentences, single_writer_option


@click.command(
    epilog="""\b
Examples:
  holdfast convert /orbax/run7 /ckpt/run7 --to holdfast                the latest step
  holdfast convert /orbax/run7 /ckpt/run7 --to holdfast --all          every step
  holdfast convert /ckpt/run7/1000 /orbax/run7 --to orbax
  holdfast convert /ckpt/run7 /export --to safetensors --path params --map names.json

\b
A map is JSON, either {"old name": "new name", ...} or rules that are tried in turn, [["layers\\\\.(\\\\d+)\\\\.w", "h.\\\\1.weight"], ...].

Exit codes: 0 done, 3 nothing there, 4 damaged, 5 refused or failed."""
)
@click.argument("src")
@click.argument("dst")
@click.option("--to", type=click.Choice(["holdfast", "orbax", "safetensors"]), required=True, help="The layout to write.")
@click.option("--step", type=int, default=None, help="Convert this step of the root SRC (default: the latest).")
@click.option("--all", "every", is_flag=True, help="Convert every step of the root SRC.")
@click.option("--item", "items", multiple=True, help="Convert this item alone; may be given more than once.")
@click.option("--path", "under", default="", help="Convert the leaves below this path alone.")
@click.option("--map", "names", type=click.Path(exists=True, dir_okay=False), help="Rename leaves by this file.")
@click.option("--shard-bytes", type=int, default=None, help="safetensors: start another file after so many bytes.")
@click.option("--process", type=int, default=None, help="Of leaves that were kept per process, take this process's (default: all).")
@single_writer_option
@json_option
def convert(
    src: str,
    dst: str,
    to: str,
    step: int | None,
    every: bool,
    items: tuple[str, ...],
    under: str,
    names: str | None,
    shard_bytes: int | None,
    process: int | None,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint in SRC (of a root: its latest step) into DST in another layout.

    For holdfast and Orbax, DST is a root and gets the step; for safetensors, DST is the folder of the files (with --all, one a step).
    """
    from holdfast.checkpoint._convert import convert as run
    from holdfast.checkpoint._layouts import Place, find_steps, open_source
    from holdfast.checkpoint._rename import parse_names
    from holdfast.checkpoint._safetensors import SHARD_BYTES
    from holdfast.checkpoint._source import total_bytes
    from holdfast.checkpoint._stores import open_store

    with sentences():
        rename = parse_names(pathlib.Path(names).read_text()) if names else None
        steps: list[int | None] = [*find_steps(open_store(src)[0])] if every else [step]
        written = []
        for number in steps or [None]:
            source = open_source(src, number)
            store, claims = open_store(dst, single_writer=single_writer)
            target = Place(store, str(number) if every and to == "safetensors" else "")
            with progress_bar("converting", total_bytes(source)) as meter:
                options: dict[str, Any] = {"items": items, "under": under, "rename": rename, "process": process, "progress": meter}
                where = run(source, target, to, shard_bytes=shard_bytes or SHARD_BYTES, claims=claims, **options)
            written.append({"from": source.info.path, "to": where, "layout": to})
            if not as_json:
                click.echo(f"{source.info.path} ({source.info.layout}) is now {where} ({to})")
    if as_json:
        print_json(written if every else written[0])


__all__ = ["convert"]

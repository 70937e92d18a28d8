"""`holdfast convert SRC DST --to LAYOUT`: the same numbers in another layout."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from .common import (
    EXIT_DAMAGED,
    Failure,
    json_option,
    print_json,
    progress_bar,
    sentences,
    single_writer_option,
)


@click.command(
    epilog="""\b
Examples:
  holdfast convert /orbax/run7 /ckpt/run7 --to holdfast                the latest step
  holdfast convert /orbax/run7 /ckpt/run7 --to holdfast --all          every step
  holdfast convert /ckpt/run7/1000 /orbax/run7 --to orbax
  holdfast convert /ckpt/run7 /export --to safetensors --path params --map names.json

\b
A map is JSON, either {"old name": "new name", ...} or rules that are tried in turn,
[["layers\\\\.(\\\\d+)\\\\.w", "h.\\\\1.weight"], ...].

Exit codes: 0 done, 3 nothing there, 4 damaged, 5 refused or failed."""
)
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to",
    type=click.Choice(["holdfast", "orbax", "safetensors"]),
    required=True,
    help="The layout to write.",
)
@click.option(
    "--step",
    type=int,
    default=None,
    help="Convert this step of the root SRC (default: the latest).",
)
@click.option("--all", "every", is_flag=True, help="Convert every step of the root SRC.")
@click.option(
    "--item", "items", multiple=True, help="Convert this item alone; may be given more than once."
)
@click.option("--path", "under", default="", help="Convert the leaves below this path alone.")
@click.option(
    "--map",
    "names",
    type=click.Path(exists=True, dir_okay=False),
    help="Rename leaves by this file.",
)
@click.option(
    "--shard-bytes",
    type=int,
    default=None,
    help="safetensors: start another file after so many bytes.",
)
@click.option(
    "--process",
    type=int,
    default=None,
    help="Of what was kept per process, take this process's (default: all).",
)
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

    For holdfast and Orbax, DST is a root and gets the step; for safetensors, DST is the folder of
    the files (with --all, one a step). With --all, steps that are in DST already are left as they
    are, and a damaged one does not stop the others.
    """
    from holdfast.checkpoint import Corrupt, HostileCheckpoint, StepExists
    from holdfast.checkpoint.format.rename import parse_names
    from holdfast.checkpoint.layouts.detect import find_steps
    from holdfast.checkpoint.layouts.safetensors import SHARD_BYTES
    from holdfast.checkpoint.storage.path import open_storage

    written: list[dict[str, str]] = []
    failed: list[str] = []
    with sentences():
        rename = parse_names(pathlib.Path(names).read_text()) if names else None
        options: dict[str, Any] = {
            "items": items,
            "under": under,
            "rename": rename,
            "process": process,
        }
        options |= {"shard_bytes": shard_bytes or SHARD_BYTES, "single_writer": single_writer}
        if not every:
            written.append(_convert_one(src, step, dst, "", to, options))
        for number in find_steps(open_storage(src)) or [None] if every else ():
            try:
                written.append(
                    _convert_one(
                        src,
                        number,
                        dst,
                        str(number) if number is not None and to == "safetensors" else "",
                        to,
                        options,
                    )
                )
            except StepExists as error:
                if number is None or to == "safetensors":  # where a part of a folder looks like one
                    raise
                click.echo(f"left as it is: {error}", err=True)
            except (Corrupt, HostileCheckpoint) as error:
                failed.append(str(error))
    if as_json:
        print_json(
            {"converted": written, "errors": failed} if failed else written if every else written[0]
        )
    for line in written if not as_json else ():
        click.echo(f"{line['from']} ({line['was']}) is now {line['to']} ({to})")
    if failed:
        raise Failure("\n".join(failed), EXIT_DAMAGED, printed=True)


def _convert_one(
    src: str, step: int | None, dst: str, folder: str, to: str, options: dict[str, Any]
) -> dict[str, str]:
    from holdfast.checkpoint.layouts.base import total_bytes
    from holdfast.checkpoint.layouts.detect import open_checkpoint
    from holdfast.checkpoint.steps.object_claims import open_claims
    from holdfast.checkpoint.storage.path import StorePath, open_storage
    from holdfast.checkpoint.tools.convert import convert as run

    arguments = {name: value for name, value in options.items() if name != "single_writer"}
    with progress_bar("converting") as meter:
        checkpoint = open_checkpoint(src, step)
        meter.expect(total_bytes(checkpoint))
        store = open_storage(dst, single_writer=options["single_writer"])
        claims = open_claims(store, single_writer=options["single_writer"])
        where = run(
            checkpoint, StorePath(store, folder), to, claims=claims, progress=meter, **arguments
        )
    return {"from": checkpoint.info.path, "was": checkpoint.info.layout, "to": where, "layout": to}

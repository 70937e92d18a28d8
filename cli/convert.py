"""`holdfast convert SRC DST --to LAYOUT`: the same numbers in another layout."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from .common import (
    EachStep,
    flag,
    folder_argument,
    json_option,
    print_json,
    progress_bar,
    refuse,
    say,
    sentences,
    single_writer_option,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.layouts.base import CheckpointReader

    from .roots import Root


@click.command(
    epilog="""\b
Examples:
  holdfast convert /orbax/run7 /ckpt/run7 --to holdfast        the latest step
  holdfast convert /orbax/run7 /ckpt/run7 --to holdfast --all  every step
  holdfast convert /ckpt/run7/1000 /orbax/run7 --to orbax
  holdfast convert /ckpt/run7 /out --to safetensors --map names.json

\b
A map is JSON: {"old name": "new name", ...}, or rules tried in turn,
[["layers\\\\.(\\\\d+)\\\\.w", "h.\\\\1.weight"], ...].

Exit codes: 0 done, 3 nothing there, 4 damaged, 5 refused or failed."""
)
@folder_argument("src")
@folder_argument("dst")
@click.option(
    "--to",
    type=click.Choice(["holdfast", "orbax", "safetensors"]),
    required=True,
    help="The layout to write.",
)
@click.option(
    "--step",
    type=int,
    help="Convert this step of the root SRC (default: the latest).",
)
@flag("--all", "every", help="Convert every step of the root SRC.")
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
    type=click.IntRange(1),
    help="safetensors: start another file after so many bytes.",
)
@click.option(
    "--shards",
    type=click.IntRange(1),
    help="safetensors: write so many files (default: as many as they were).",
)
@click.option(
    "--beside",
    type=str,
    metavar="FOLDER",
    help="safetensors: put config, tokenizer and so on of the model in FOLDER beside them.",
)
@click.option(
    "--process",
    type=click.IntRange(0),
    help="Of what was kept per process, take this process's (default: all).",
)
@single_writer_option
@json_option
def convert(
    src: str,
    dst: str,
    *,
    step: int | None,
    every: bool,
    to: str,
    names: str | None,
    single_writer: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the checkpoint in SRC (of a root: its latest step) into DST in another layout.

    For holdfast and Orbax, DST is a root and gets the step; for safetensors, DST is the folder of
    the files (with --all, one a step). With --all, steps that are in DST already are left as they
    are, a damaged one does not stop the others, and those that were left behind in SRC are not
    written.
    """
    if every:
        refuse({"--step": "names one step: leave --all out"})
    each = EachStep(several=every)
    conversion = Conversion(dst, single_writer, to, names, options)
    with sentences():
        if every:
            conversion.write_all(src, each)
        else:
            each.run([step], lambda step: conversion.write(src, step))
    if as_json:
        print_json({"converted": conversion.written, "errors": each.errors})
    else:
        for line in conversion.written:
            say(f"{line['from']} ({line['was']}) is now {line['to']} ({line['layout']})")
    each.end()


@dataclass
class Conversion:
    """What is written where, how, and what has come of it. `options` are those of `convert` in
    `holdfast.checkpoint.tools`.
    """

    dst: str
    single_writer: bool
    to: str
    names: str | None
    options: dict[str, Any]
    written: list[dict[str, str]] = field(default_factory=list)

    def write_all(self, src: str, each: EachStep) -> None:
        """Converts the steps of a root, but for those that were left behind."""
        from .roots import Root

        root = Root(src)
        if not root.steps:
            self.write(src, None)
            return
        going = [step for step in root.steps if step not in root.left_behind]
        each.run(going, lambda step: self._write_step(root, step))
        for step in sorted(root.left_behind):
            hint = f"`--step {step}` writes it"
            say(f"step {step} was left behind, and is not written: {hint}", err=True)

    def _write_step(self, root: Root, step: int) -> None:
        """Converts one step of several; one that is there already stays."""
        from holdfast.checkpoint import StepExists

        single_files = self.to == "safetensors"
        try:
            with root.opened(step) as checkpoint:
                self._write(checkpoint, str(step) if single_files else "")
        except StepExists as error:
            if single_files:  # a part of a folder looks like a step
                raise
            say(f"left as it is: {error}", err=True)

    def write(self, src: str, step: int | None) -> None:
        """Converts one checkpoint."""
        from holdfast.checkpoint.layouts.detect import open_checkpoint

        self._write(open_checkpoint(src, step), "")

    def _write(self, checkpoint: CheckpointReader, folder: str) -> None:
        from holdfast.checkpoint.format.rename import parse_names
        from holdfast.checkpoint.layouts.base import total_bytes
        from holdfast.checkpoint.steps.object_claims import open_claims
        from holdfast.checkpoint.storage.path import StorePath, open_storage
        from holdfast.checkpoint.tools.convert import convert as run

        rename = parse_names(pathlib.Path(self.names).read_text()) if self.names else None
        with progress_bar("converting") as meter:
            meter.expect(total_bytes(checkpoint))
            store = open_storage(self.dst, single_writer=self.single_writer)
            where = run(
                checkpoint,
                StorePath(store, folder),
                self.to,
                rename=rename,
                claims=open_claims(store, single_writer=self.single_writer),
                progress=meter,
                **self.options,
            )
        info = checkpoint.info
        self.written.append({"from": info.path, "was": info.layout, "to": where, "layout": self.to})

"""`holdfast cp SRC DST`: copies checkpoints between stores."""

from __future__ import annotations

import click
from rich.filesize import decimal

from ._common import json_option, print_json, progress_bar, sentences


@click.command(
    epilog="""\b
Examples:
  holdfast cp /ckpt/run7 gs://bucket/run7               every step
  holdfast cp /ckpt/run7 s3://bucket/run7 --step 1000   one step
  holdfast cp /ckpt/run7/1000 /elsewhere/1000           a single checkpoint

A copy that was cut off is continued by the same command.

Exit codes: 0 done and verified, 3 nothing there, 4 damaged, 5 refused or failed."""
)
@click.argument("src")
@click.argument("dst")
@click.option("--step", type=int, default=None, help="Copy this step of the root SRC alone.")
@json_option
def cp(src: str, dst: str, step: int | None, as_json: bool) -> None:
    """Copy the checkpoint SRC, or every step of the root SRC, to DST, and verify the copy by reading it back."""
    from holdfast.checkpoint._copy import Copied, copy_checkpoint, file_sizes
    from holdfast.checkpoint._layouts import Place, find_steps, open_source, recognise
    from holdfast.checkpoint._stores import open_store

    total = Copied()
    with sentences():
        storage = open_store(src)[0]
        target, claims = open_store(dst)
        folders = [name for number, (name, _) in find_steps(storage).items() if step in (None, number)]
        if step is None and recognise(Place(storage)) is not None:
            folders = [""]
        if not folders:
            open_source(src, step)  # raises, saying what is there instead
        size = sum(sum(file_sizes(Place(storage, name)).values()) for name in folders)
        with progress_bar("copying", size) as advance:
            for name in folders:
                done = copy_checkpoint(Place(storage, name), Place(target, name), claims, advance)
                total.written += [f"{name}/{file}" if name else file for file in done.written]
                total.skipped += [f"{name}/{file}" if name else file for file in done.skipped]
                total.bytes += done.bytes
    if as_json:
        print_json({"written": total.written, "skipped": total.skipped, "bytes": total.bytes, "verified": True})
        return
    kept = f", {len(total.skipped)} were there already" if total.skipped else ""
    click.echo(f"{len(total.written)} files copied ({decimal(total.bytes)}){kept}; the copy was read back and is whole")


__all__ = ["cp"]

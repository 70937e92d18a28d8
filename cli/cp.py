"""`holdfast cp SRC DST`: copies checkpoints between stores."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from holdfast.coordination.diagnosis.summary import counted

from .common import (
    EachStep,
    Failure,
    folder_argument,
    json_option,
    print_json,
    progress_bar,
    sentences,
    single_writer_option,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.tools.copy import Copied


@click.command(
    epilog="""\b
Examples:
  holdfast cp /ckpt/run7 gs://bucket/run7               every step
  holdfast cp /ckpt/run7 s3://bucket/run7 --step 1000   one step
  holdfast cp /ckpt/run7/1000 /elsewhere/1000           a single checkpoint

A copy that was cut off is continued by the same command.

Exit codes: 0 done and verified, 3 nothing there, 4 damaged (the other steps are copied),
5 refused or failed."""
)
@folder_argument("src")
@folder_argument("dst")
@click.option("--step", type=int, help="Copy this step of the root SRC alone.")
@single_writer_option
@json_option
def cp(src: str, dst: str, step: int | None, single_writer: bool, as_json: bool) -> None:
    """Copy the checkpoint SRC, or every step of the root SRC, to DST, and verify the copy by
    reading it back.
    """
    from holdfast.checkpoint.layouts.detect import find_steps, left_steps
    from holdfast.checkpoint.steps.object_claims import open_claims
    from holdfast.checkpoint.storage.path import StorePath, open_storage
    from holdfast.checkpoint.tools.copy import copy_checkpoint, copy_marks, copy_step_names

    copies = _Copies()
    with sentences(), progress_bar("copying") as meter:
        storage = open_storage(src)
        folders = _folders(src, storage, step)
        each = EachStep(several=folders != [""])
        target = open_storage(dst, single_writer=single_writer)
        claims = open_claims(target, single_writer=single_writer)
        if folders != [""]:
            copy_step_names(storage, target, claims, folders)
        # A step that was left behind, and is asked for by its number, is not left behind there.
        lives = step is None or step not in left_steps(storage, find_steps(storage))
        if folders != [""] and lives:
            copy_marks(storage, target, claims)
        meter.expect(_size(storage, folders))

        def copy(name: str) -> None:
            paths = StorePath(storage, name), StorePath(target, name)
            copies.add(name, copy_checkpoint(*paths, claims, meter))

        each.run(folders, copy)
    if as_json:
        errors = each.errors
        print_json({**asdict(copies), "verified": not errors, "errors": errors})
    elif each.done:
        copies.show()
    each.end()


@dataclass
class _Copies:
    """What was copied, of all checkpoints together."""

    written: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    bytes: int = 0

    def add(self, folder: str, copied: Copied) -> None:
        """Takes the copy of one checkpoint, whose files lie in `folder`."""
        prefix = f"{folder}/" if folder else ""
        self.written += [f"{prefix}{file}" for file in copied.written]
        self.skipped += [f"{prefix}{file}" for file in copied.skipped]
        self.bytes += copied.bytes

    def show(self) -> None:
        """Prints what was copied."""
        were = "was" if len(self.skipped) == 1 else "were"
        kept = f", {len(self.skipped)} {were} there already" if self.skipped else ""
        copied = f"{counted(len(self.written), 'file')} copied ({decimal(self.bytes)}){kept}"
        click.echo(f"{copied}; what was copied was read back and is whole")


def _folders(src: str, storage: Any, step: int | None) -> list[str]:
    """Returns the folders of the checkpoints to copy, relative to the store's root."""
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint.layouts.detect import find_checkpoint, find_steps, open_checkpoint

    folders = [name for number, (name, _) in find_steps(storage).items() if step in (None, number)]
    if step is None:
        with contextlib.suppress(StepNotFound):  # every step was left behind
            folder, _ = find_checkpoint(storage)
            folders = folders if folder.name else [""]
    if not folders:
        open_checkpoint(src, step)  # raises, saying what is there instead
        raise Failure(
            f"{src} is a single file: copy it as you copy files; `holdfast verify` checks the copy"
        )
    return folders


def _size(storage: Any, folders: list[str]) -> int:
    from holdfast.checkpoint import CheckpointError
    from holdfast.checkpoint.storage.path import StorePath
    from holdfast.checkpoint.tools.copy import file_sizes

    total = 0
    for name in folders:
        try:
            total += sum(file_sizes(StorePath(storage, name)).values())
        except CheckpointError:
            continue  # a damaged record: the copy says so
    return total

"""`holdfast cp SRC DST`: copies checkpoints between stores."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING

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
    say,
    sentences,
    single_writer_option,
)

if TYPE_CHECKING:
    from holdfast.checkpoint import Storage
    from holdfast.checkpoint.tools.copy import Copied

    from .roots import Root


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
    from holdfast.checkpoint.steps.object_claims import open_claims
    from holdfast.checkpoint.storage.path import StorePath, open_storage
    from holdfast.checkpoint.tools.copy import (
        Copied,
        copy_checkpoint,
        copy_marks,
        copy_step_names,
    )

    from .roots import Root

    copied = Copied()
    with sentences(), progress_bar("copying") as meter:
        root = Root(src)
        folders = _folders(root, step)
        is_root = folders != [""]
        each = EachStep(several=is_root)
        target = open_storage(dst, single_writer=single_writer)
        claims = open_claims(target, single_writer=single_writer)
        if is_root:
            copy_step_names(root.storage, target, claims, folders)
            # A step that was left behind, and is asked for by its number, is not left there.
            if step is None or step not in root.left_behind:
                copy_marks(root.storage, target, claims)
        meter.expect(_size(root.storage, folders))

        def copy(name: str) -> None:
            paths = StorePath(root.storage, name), StorePath(target, name)
            _add(copied, name, copy_checkpoint(*paths, claims, meter))

        each.run(folders, copy)
    if as_json:
        errors = each.errors
        print_json({**asdict(copied), "verified": not errors, "errors": errors})
    elif each.done:
        _show(copied)
    each.end()


def _add(copied: Copied, folder: str, one: Copied) -> None:
    """Adds the copy of one checkpoint, whose files lie in `folder`, to that of all."""
    prefix = f"{folder}/" if folder else ""
    copied.written.extend(f"{prefix}{file}" for file in one.written)
    copied.skipped.extend(f"{prefix}{file}" for file in one.skipped)
    copied.wrote(one.bytes)


def _show(copied: Copied) -> None:
    were = "was" if len(copied.skipped) == 1 else "were"
    kept = f", {len(copied.skipped)} {were} there already" if copied.skipped else ""
    files = f"{counted(len(copied.written), 'file')} copied ({decimal(copied.bytes)})"
    say(f"{files}{kept}; what was copied was read back and is whole")


def _folders(root: Root, step: int | None) -> list[str]:
    """Returns the folders of the checkpoints to copy, relative to the store's root."""
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint.layouts.detect import (
        find_checkpoint,
        is_single_file,
        open_checkpoint,
    )

    from .roots import ALL_GONE

    folders = [name for number, (name, _) in root.steps.items() if step in (None, number)]
    if step is None:
        with contextlib.suppress(StepNotFound):  # every step was left behind
            folder, _ = find_checkpoint(root.storage)
            folders = folders if folder.name else [""]
    if not folders:
        open_checkpoint(root.path, step)  # raises, saying what is there instead
        if not is_single_file(root.path):
            raise StepNotFound(f"{root.path} {ALL_GONE}")
        raise Failure(
            f"{root.path} is a single file: copy it as you copy files; `holdfast verify` checks the"
            " copy"
        )
    return folders


def _size(storage: Storage, folders: list[str]) -> int:
    from holdfast.checkpoint import CheckpointError
    from holdfast.checkpoint.storage.path import StorePath
    from holdfast.checkpoint.tools.copy import file_sizes

    total = 0
    for name in folders:
        with contextlib.suppress(CheckpointError, OSError):  # the copy says so
            total += sum(file_sizes(StorePath(storage, name)).values())
    return total

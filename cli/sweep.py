"""`holdfast sweep ROOT`: removes what dead writers left unfinished."""

from __future__ import annotations

import click

from holdfast.coordination.diagnosis.summary import counted

from .common import (
    flag,
    folder_argument,
    json_option,
    local_option,
    print_json,
    progress_bar,
    refuse,
    say,
    sentences,
)


@click.command(
    epilog="""\b
Examples:
  holdfast sweep /ckpt/run7
  holdfast sweep /ckpt/run7 --local /dev/shm/ckpt    on this host alone
  holdfast sweep /ckpt/run7 --force    fence every writer first, dead or alive

Exit codes: 0 done, 3 nothing there, 5 refused or failed."""
)
@folder_argument("root")
@flag("--force", help="Fence every writer, also one that lives: its next save fails.")
@local_option("alone")
@json_option
def sweep(root: str, force: bool, local: str | None, as_json: bool) -> None:
    """Delete the unfinished saves in ROOT whose writers are dead. Steps that are there, and other
    people's files, are never touched.
    """
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint import sweep as run
    from holdfast.checkpoint.format.step_folders import step_folders
    from holdfast.checkpoint.layouts.detect import nothing_at
    from holdfast.checkpoint.steps.claims import FOLDER
    from holdfast.checkpoint.storage.path import open_storage

    if local is not None:
        refuse({"--force": "is for the root's writers: leave --local out"})
        _sweep_host(root, local, as_json)
        return
    with sentences(), progress_bar("sweeping", counts=False):
        storage = open_storage(root)
        if not step_folders(storage) and not storage.list(FOLDER, recursive=True):
            raise StepNotFound(nothing_at(storage), path=root)
        swept = run(root, force=force)
    if as_json:
        print_json({"fenced": swept.fenced, "files": swept.files, "standing": swept.standing})
        return
    for reason in swept.fenced:
        say(f"fenced: {reason}")
    for name in swept.files:
        say(f"deleted: {name}")
    living = f"; {counted(len(swept.standing), 'writer')} still at work" if swept.standing else ""
    say(f"{counted(len(swept.files), 'file')} of unfinished saves deleted{living}")


def _sweep_host(root: str, local: str, as_json: bool) -> None:
    """Deletes what is dead or torn of a root's local steps on this host."""
    from holdfast.checkpoint.local_tier.host_steps import sweep_host
    from holdfast.checkpoint.storage.path import open_storage

    with sentences(), progress_bar("sweeping", counts=False):
        deleted = sweep_host(open_storage(root), local)
    if as_json:
        print_json({"deleted": deleted})
        return
    for name in deleted:
        say(f"deleted: {local}: {name}")
    say(f"{counted(len(deleted), 'dead or torn local step')} deleted")

"""`holdfast ls ROOT`: the steps of a root."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal
from rich.text import Text

from .common import (
    folder_argument,
    json_option,
    local_option,
    print_json,
    progress_bar,
    sentences,
    shown_time,
)
from .tables import Table, console

if TYPE_CHECKING:
    from holdfast.checkpoint.layouts.base import CheckpointLayout, CheckpointReader
    from holdfast.checkpoint.local_tier.host_steps import HostStep
    from holdfast.checkpoint.storage.base import Storage
    from holdfast.checkpoint.storage.path import StorePath

_ORBAX_MARK = ".orbax-checkpoint-tmp"
_MOST_WRONG = 3
_COLOURS = {"damaged": "red", "dead": "red", "unfinished": "yellow", "left behind": "yellow"}


@click.command(
    epilog="""\b
Examples:
  holdfast ls /ckpt/run7
  holdfast ls gs://bucket/run7 --json
  holdfast ls /ckpt/run7 --local /dev/shm/ckpt    with local steps

Exit codes: 0 listed (also when a step is damaged), 3 nothing there, 5 could not be read."""
)
@folder_argument("root")
@local_option("too")
@json_option
def ls(root: str, local: str | None, as_json: bool) -> None:
    """List the steps of ROOT: sizes, times, metrics, and what was begun and never finished."""
    with sentences(), progress_bar("listing", counts=False):
        rows, beside = _rows(root) if local is None else _durable_rows(root)
        if local is not None:
            rows += _local_rows(root, local)
    if as_json:
        print_json({"root": root, "steps": rows, "beside": beside})
        return
    click.echo(root)
    console().print(_table(rows))
    notes = [f"{row['name']}: {row['note']}" for row in rows if row["note"]]
    notes += [
        f"{name}: a checkpoint ({layout}), but no step of this root; open it by its own path"
        for name, layout in beside.items()
    ]
    for line in ["", *notes] if notes else []:
        click.echo(line)


def _table(rows: list[dict[str, Any]]) -> Table:
    # Steps of incremental saves share files: the deletion of one frees less than its size.
    shares = any(_frees(row) != row["bytes"] for row in rows)
    titles = ["step", "state", "layout", "saved", "on disk", "frees", "items", "metrics"]
    if not shares:
        titles.remove("frees")
    table = Table(
        titles,
        folds=["items", "layout", "frees", "metrics", "saved", "on disk", "state"],
        numbers=["step", "on disk", "frees"],
    )
    for row in rows:
        table.add(*_cells(row, shares))
    return table


def _cells(row: dict[str, Any], shares: bool) -> list[str | Text]:
    sizes = [decimal(row["bytes"])]
    if shares:
        sizes.append(decimal(_frees(row)))
    metrics = [
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row["metrics"].items()
    ]
    return [
        str(row["name"]),
        Text(row["state"], style=_COLOURS.get(row["state"], "")),
        row["layout"],
        shown_time(row["saved_s"])[:-3],
        *sizes,
        ", ".join(row["items"]),
        ", ".join(metrics),
    ]


def _frees(row: dict[str, Any]) -> int:
    """Returns the bytes that the deletion of a step frees."""
    return int(row.get("frees_bytes", row["bytes"]))


def _listed(name: str, state: str, size: int, **facts: Any) -> dict[str, Any]:
    """Returns the row of one step, or of what looks like one."""
    row: dict[str, Any] = {
        "name": name,
        "step": None,
        "state": state,
        "layout": "",
        "saved_s": None,
        "bytes": size,
        "files": 0,
        "items": [],
        "metrics": {},
        "left_behind": False,
        "note": "",
    }
    return row | facts


def _rows(root: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the rows of a root; and by their folders' names the layouts of checkpoints in it that
    are called by a number, but are no steps.
    """
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint.layouts.detect import (
        find_steps,
        layout_of,
        left_steps,
        nothing_at,
        strangers,
    )
    from holdfast.checkpoint.storage.path import StorePath, open_storage

    storage = open_storage(root)
    here = StorePath(storage)
    steps = find_steps(storage)
    beside = dict(strangers(storage, steps))
    left = left_steps(storage, steps)
    rows = [
        _row(StorePath(storage, name), layout, step, is_left=step in left)
        for step, (name, layout) in steps.items()
    ]
    whole = layout_of(here) if not rows else None
    if whole is not None:
        return [_row(here, whole, None)], beside
    if not rows and root.endswith(".safetensors"):
        return [_file_row(root)], beside
    finished = {row["name"] for row in rows}
    rows += [
        _unfinished(StorePath(storage, name), name)
        for name in _begun(storage, {*finished, *beside})
    ]
    if not rows:
        raise StepNotFound(nothing_at(storage), path=root)
    return rows, beside


def _durable_rows(root: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the same of a root that may have no step but on its hosts."""
    from holdfast.checkpoint import StepNotFound

    try:
        return _rows(root)
    except StepNotFound:
        return [], {}


def _local_rows(root: str, local: str) -> list[dict[str, Any]]:
    from holdfast.checkpoint.local_tier.host_steps import list_host_steps
    from holdfast.checkpoint.storage.path import open_storage

    return [_local_row(host_step) for host_step in list_host_steps(open_storage(root), local)]


def _local_row(host_step: HostStep) -> dict[str, Any]:
    """Returns the row of a local step, as far as one host knows it."""
    key = host_step.key
    parts = host_step.parts
    heads = [part.head for part in parts if part.head is not None]
    processes = sorted(part.process for part in parts)
    return _listed(
        f"{key.step} (local)",
        "dead" if host_step.dead else "local",
        host_step.bytes,
        step=key.step,
        layout="holdfast",
        saved_s=heads[0].finished_s if heads else None,
        files=sum(len(part.files) for part in parts),
        items=sorted(parts[0].items),
        parts=processes,
        processes=key.processes,
        metrics=dict(heads[0].metrics) if heads else {},
        note=_where(processes, key.processes, host_step.dead),
    )


def _where(here: list[int], count: int, dead: str) -> str:
    """Says which parts of a local step one host has, and what can be known of it from here."""
    parts = f"parts of processes {', '.join(map(str, here))} of {count} are here"
    if dead:
        return f"{parts}; {dead}"
    if len(here) == count:
        return (
            f"{parts}: all, so that it survives the loss of every other host; `holdfast status` of"
            " its job says where there are copies"
        )
    return (
        f"{parts}; whether other hosts have the rest, or copies of these, is not known here:"
        " `holdfast status` of its job says that"
    )


def _file_row(path: str) -> dict[str, Any]:
    """Returns the row of a single safetensors file."""
    from holdfast.checkpoint.layouts.base import total_bytes
    from holdfast.checkpoint.layouts.detect import open_checkpoint

    size = total_bytes(open_checkpoint(path))
    name = path.rpartition("/")[2]
    return _listed(name, "whole", size, layout="safetensors", files=1, items=["state"])


def _row(
    folder: StorePath, layout: CheckpointLayout, step: int | None, *, is_left: bool = False
) -> dict[str, Any]:
    from holdfast.checkpoint import CheckpointError, StepGone
    from holdfast.checkpoint.layouts.detect import while_it_is_there
    from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
    from holdfast.checkpoint.tools.copy import file_sizes

    checkpoint: CheckpointReader | None = None
    wrong: list[str] = []
    try:
        with while_it_is_there(folder):
            checkpoint = layout.open(folder)
        entries = folder.storage.list(folder.name, recursive=True)
        if isinstance(checkpoint, HoldfastCheckpoint):
            wrong = checkpoint.misfits(entries)
    except StepGone as error:
        return _listed(folder.basename, "gone", 0, step=step, left_behind=is_left, note=str(error))
    except CheckpointError as error:
        wrong = [str(error)]
        entries = folder.storage.list(folder.name, recursive=True)
    sizes: dict[str, int] = {}
    with contextlib.suppress(CheckpointError):
        sizes = file_sizes(folder, entries)
    size = sum(sizes.values())
    state = "left behind" if is_left else "whole"
    row = _listed(folder.basename, state, size, step=step, files=len(sizes), left_behind=is_left)
    # Files of incremental saves have another name elsewhere.
    row["frees_bytes"] = size - sum(entry.size or 0 for entry in entries if entry.links > 1)
    if wrong:
        more = " ..." if len(wrong) > _MOST_WRONG else ""
        row |= {"state": "damaged", "note": "; ".join(wrong[:_MOST_WRONG]) + more}
    if checkpoint is None:
        return row
    info = checkpoint.info
    row |= {
        "layout": info.layout,
        "saved_s": info.finished_s,
        "items": list(info.items),
        "metrics": dict(info.metrics),
    }
    if step is None:
        row["step"] = info.step
    return row


def _begun(storage: Storage, finished: set[str]) -> list[str]:
    """Returns the folders that look like steps but hold no finished checkpoint."""
    from holdfast.checkpoint.format.step_folders import read_step_names

    names = read_step_names(storage)
    begun = []
    for entry in storage.list(""):
        name = entry.name[:-1]
        is_ours = name.isdigit() or names.step_of(name) is not None
        like_a_step = is_ours or _ORBAX_MARK in name
        if not entry.name.endswith("/") or not like_a_step or name in finished:
            continue
        # An object store has no empty folders: what is listed there is a hidden tombstone.
        if "://" not in storage.root or storage.list(name, recursive=True):
            begun.append(name)
    return begun


def _unfinished(folder: StorePath, name: str) -> dict[str, Any]:
    from holdfast.checkpoint.layouts.detect import are_packs

    entries = folder.storage.list(folder.name, recursive=True)
    note = "no finished checkpoint: a save is under way, or `holdfast sweep` removes it"
    if not are_packs(entry.name for entry in entries):
        note = "no finished checkpoint, and not holdfast's alone: `holdfast sweep` leaves it"
    layout = ""
    if _ORBAX_MARK in name:
        note = "begun by Orbax and never finished"
        layout = "orbax"
    size = sum(entry.size or 0 for entry in entries)
    return _listed(name, "unfinished", size, layout=layout, files=len(entries), note=note)

"""`holdfast ls ROOT`: the steps of a root."""

from __future__ import annotations

from typing import Any

import click
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .common import (
    console,
    json_option,
    local_option,
    print_json,
    progress_bar,
    sentences,
    shown_time,
)


@click.command(
    epilog="""\b
Examples:
  holdfast ls /ckpt/run7
  holdfast ls gs://bucket/run7 --json
  holdfast ls /ckpt/run7 --local /dev/shm/holdfast    with what this host has of local steps

Exit codes: 0 listed (also when a step is damaged), 3 nothing there, 5 could not be read."""
)
@click.argument("root")
@local_option
@json_option
def ls(root: str, local: str | None, as_json: bool) -> None:
    """List the steps of ROOT: sizes, times, metrics, and what was begun and never finished."""
    with sentences(), progress_bar("listing", counts=False):
        rows = _rows(root) if local is None else _durable_rows(root) + _local_rows(root, local)
    if as_json:
        print_json(rows)
        return
    table = Table(
        title=escape(root), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    shares = any(
        row.get("frees_bytes", row["bytes"]) != row["bytes"] for row in rows
    )  # steps of incremental saves
    for column in (
        "step",
        "state",
        "layout",
        "saved",
        "size",
        *(["frees"] if shares else []),
        "items",
        "metrics",
    ):
        narrow = column in ("items", "metrics")
        is_number = column in ("step", "size", "frees")
        table.add_column(
            column, justify="right" if is_number else "left", overflow="fold", no_wrap=not narrow
        )
    for row in rows:
        metrics = ", ".join(
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row["metrics"].items()
        )
        shown = (
            row["state"],
            row["layout"],
            shown_time(row["saved_s"])[:-3],
            decimal(row["bytes"]),
        )
        frees = (decimal(row.get("frees_bytes", row["bytes"])),) if shares else ()
        table.add_row(
            escape(str(row["name"])),
            *shown,
            *frees,
            escape(", ".join(row["items"])),
            escape(metrics),
        )
    console().print(table)
    for row in rows:
        if row["note"]:
            click.echo(f"{row['name']}: {row['note']}")


def _rows(root: str) -> list[dict[str, Any]]:
    from holdfast.checkpoint.layouts.detect import find_steps, open_if_finished
    from holdfast.checkpoint.storage.path import StorePath, open_storage

    storage = open_storage(root)
    steps = find_steps(storage)
    folders = {name: step for step, (name, _) in steps.items()}
    rows = [_row(StorePath(storage, name), name, step) for name, step in folders.items()]
    if not rows and open_if_finished(StorePath(storage)) is not None:
        return [_row(StorePath(storage), StorePath(storage).basename, None)]
    if not rows and root.endswith(".safetensors"):
        return [_file_row(root)]
    rows += [_unfinished(StorePath(storage, name), name) for name in _begun(storage, set(folders))]
    if not rows:
        from holdfast.checkpoint import StepNotFound
        from holdfast.checkpoint.layouts.detect import nothing_at

        raise StepNotFound(nothing_at(storage), path=root)
    return rows


def _durable_rows(root: str) -> list[dict[str, Any]]:
    """Returns the rows of a root that may have no step but on its hosts."""
    from holdfast.checkpoint import StepNotFound

    try:
        return _rows(root)
    except StepNotFound:
        return []


def _local_rows(root: str, local: str) -> list[dict[str, Any]]:
    from holdfast.checkpoint.local_tier.host_steps import list_host_steps
    from holdfast.checkpoint.storage.path import open_storage

    rows = []
    for step in list_host_steps(open_storage(root), local):
        heads = [found.head for found in step.parts if found.head is not None]
        processes = sorted(found.process for found in step.parts)
        row: dict[str, Any] = {
            "name": f"{step.key.step} (local)",
            "step": step.key.step,
            "state": "dead" if step.dead else "local",
        }
        row |= {
            "layout": "holdfast",
            "saved_s": heads[0].finished_s if heads else None,
            "bytes": step.bytes,
        }
        row |= {
            "files": sum(len(found.files) for found in step.parts),
            "items": sorted(step.parts[0].items),
        }
        row |= {
            "parts": processes,
            "processes": step.key.processes,
            "metrics": dict(heads[0].metrics) if heads else {},
        }
        rows.append(row | {"note": _where(processes, step.key.processes, step.dead)})
    return rows


def _where(here: list[int], count: int, dead: str) -> str:
    """Says which parts of a local step one host has, and what that means as far as it can be known
    here.
    """
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
    row: dict[str, Any] = {
        "name": path.rpartition("/")[2],
        "step": None,
        "state": "whole",
        "layout": "safetensors",
        "saved_s": None,
    }
    return row | {"bytes": size, "files": 1, "items": ["state"], "metrics": {}, "note": ""}


def _row(folder: Any, name: str, step: int | None) -> dict[str, Any]:
    from holdfast.checkpoint import CheckpointError
    from holdfast.checkpoint.layouts.detect import open_if_finished
    from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
    from holdfast.checkpoint.tools.copy import file_sizes, shared_bytes

    try:
        sizes, shared = list(file_sizes(folder).values()), shared_bytes(folder)
    except CheckpointError:
        sizes = []
        shared = 0
    row: dict[str, Any] = {
        "name": name,
        "step": step,
        "state": "whole",
        "layout": "",
        "saved_s": None,
        "bytes": sum(sizes),
    }
    row |= {
        "frees_bytes": sum(sizes) - shared,
        "files": len(sizes),
        "items": [],
        "metrics": {},
        "note": "",
    }
    try:
        checkpoint = open_if_finished(folder)
        if checkpoint is None:
            return row | {"state": "gone", "note": "it was deleted while it was listed"}
        info = checkpoint.info
        wrong = checkpoint.misfits() if isinstance(checkpoint, HoldfastCheckpoint) else []
    except CheckpointError as error:
        return row | {"state": "damaged", "note": str(error)}
    facts = {
        "layout": info.layout,
        "saved_s": info.finished_s,
        "items": list(info.items),
        "metrics": dict(info.metrics),
    }
    if wrong:
        facts |= {
            "state": "damaged",
            "note": f"{'; '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}",
        }
    return row | facts | {"step": info.step if step is None else step}


def _begun(storage: Any, finished: set[str]) -> list[str]:
    """Returns the folders that look like steps but hold no finished checkpoint."""
    from holdfast.checkpoint.format.step_folders import read_step_names

    found, names = [], read_step_names(storage)
    for entry in storage.list(""):
        name = entry.name[:-1]
        is_ours = name.isdigit() or names.step_of(name) is not None
        named_like_a_step = entry.name.endswith("/") and (
            is_ours or ".orbax-checkpoint-tmp" in name
        )
        if not named_like_a_step or name in finished:
            continue
        if "://" not in storage.root or storage.list(
            name, recursive=True
        ):  # else a hidden tombstone: there are no empty folders
            found.append(name)
    return found


def _unfinished(folder: Any, name: str) -> dict[str, Any]:
    entries = folder.storage.list(folder.name, recursive=True)
    by_orbax = ".orbax-checkpoint-tmp" in name
    note = (
        "begun by Orbax and never finished"
        if by_orbax
        else "no finished checkpoint: a save is under way, or `holdfast sweep` removes it"
    )
    sizes = [entry.size or 0 for entry in entries]
    row: dict[str, Any] = {
        "name": name,
        "step": None,
        "state": "unfinished",
        "layout": "orbax" if by_orbax else "",
        "saved_s": None,
    }
    return row | {
        "bytes": sum(sizes),
        "files": len(sizes),
        "items": [],
        "metrics": {},
        "note": note,
    }

"""The rows of `holdfast ls`. It imports jax, as `roots` does."""

from __future__ import annotations

import contextlib
from typing import Any

from holdfast.checkpoint import CheckpointError, StepGone
from holdfast.checkpoint.format.step_folders import read_step_names, root_folders
from holdfast.checkpoint.layouts.base import CheckpointLayout, total_bytes
from holdfast.checkpoint.layouts.detect import are_packs, layout_of, open_checkpoint, strangers
from holdfast.checkpoint.local_tier.host_steps import HostStep, list_host_steps
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.copy import file_sizes

from .common import failure_of
from .roots import Root, look_at

_ORBAX_MARK = ".orbax-checkpoint-tmp"
_MOST_WRONG = 3


def list_root(path: str, local: str | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the rows of a root, those of its local steps in a host's folder last; and by their
    folders' names the layouts of checkpoints in it that are called by a number, but are no steps.
    """
    root = Root(path)
    beside = dict(strangers(root.storage, root.steps))
    rows = _finished(root)
    # A checkpoint by itself is no step, and has nothing unfinished beside it.
    if root.steps or not rows:
        rows += [_unfinished(StorePath(root.storage, name)) for name in _begun(root, beside)]
    if local is not None:
        rows += [_local_row(step) for step in list_host_steps(root.storage, local)]
    if not rows:
        raise root.nothing()
    return rows, beside


def _finished(root: Root) -> list[dict[str, Any]]:
    """Returns the rows of a root's steps, or of the one checkpoint that its path means."""
    if root.steps:
        return [_step_row(root, step) for step in root.steps]
    here = StorePath(root.storage)
    layout = layout_of(here)
    if layout is not None:
        return [_row(here, layout)]
    if not root.path.endswith(".safetensors"):
        return []
    size = total_bytes(open_checkpoint(root.path))
    name = root.path.rpartition("/")[2]
    return [_listed(name, "whole", size, layout="safetensors", files=1, items=["state"])]


def _listed(name: str, state: str, size: int, **facts: Any) -> dict[str, Any]:
    """Returns the row of one step, or of what looks like one."""
    row: dict[str, Any] = {
        "name": name,
        "step": None,
        "state": state,
        "layout": "",
        "saved_s": None,
        "bytes": size,
        "frees_bytes": size,
        "files": 0,
        "items": [],
        "metrics": {},
        "left_behind": False,
        "note": "",
    }
    return row | facts


def _step_row(root: Root, step: int) -> dict[str, Any]:
    folder = root.folder(step)
    try:
        row = _row(folder, root.steps[step][1])
    except StepGone as error:
        row = _listed(folder.basename, "gone", 0, note=str(error))
    except PermissionError as error:
        row = _listed(folder.basename, "unreadable", 0, note=failure_of(error).message)
    row |= {"step": step, "left_behind": step in root.left_behind}
    if row["left_behind"] and row["state"] == "whole":
        row["state"] = "left behind"
    return row


def _row(folder: StorePath, layout: CheckpointLayout) -> dict[str, Any]:
    checkpoint, entries, wrong = look_at(folder, layout)
    sizes: dict[str, int] = {}
    with contextlib.suppress(CheckpointError):
        sizes = file_sizes(folder, entries)
    size = sum(sizes.values())
    row = _listed(folder.basename, "whole", size, files=len(sizes))
    # Files of incremental saves have another name elsewhere.
    row["frees_bytes"] = size - sum(entry.size or 0 for entry in entries if entry.links > 1)
    if wrong:
        more = " ..." if len(wrong) > _MOST_WRONG else ""
        row |= {"state": "damaged", "note": "; ".join(wrong[:_MOST_WRONG]) + more}
    if checkpoint is None:
        return row
    info = checkpoint.info
    return row | {
        "step": info.step,
        "layout": info.layout,
        "saved_s": info.finished_s,
        "items": list(info.items),
        "metrics": dict(info.metrics),
    }


def _begun(root: Root, beside: dict[str, str]) -> list[str]:
    """Returns the folders that look like steps but hold no finished checkpoint."""
    finished = {*beside, *(name for name, _ in root.steps.values())}
    names = read_step_names(root.storage)
    begun = []
    for name in root_folders(root.storage):
        is_ours = name.isdigit() or names.step_of(name) is not None
        if name in finished or not (is_ours or _ORBAX_MARK in name):
            continue
        # An object store has no empty folders: what is listed there is a hidden tombstone.
        if root.storage.posix is not None or root.storage.list(name, recursive=True):
            begun.append(name)
    return begun


def _unfinished(folder: StorePath) -> dict[str, Any]:
    entries = folder.storage.list(folder.name, recursive=True)
    layout = ""
    note = "no finished checkpoint: a save is under way, or `holdfast sweep` removes it"
    if _ORBAX_MARK in folder.name:
        layout = "orbax"
        note = "begun by Orbax and never finished"
    elif not are_packs(entry.name for entry in entries):
        note = "no finished checkpoint, and not holdfast's alone: `holdfast sweep` leaves it"
    size = sum(entry.size or 0 for entry in entries)
    return _listed(folder.name, "unfinished", size, layout=layout, files=len(entries), note=note)


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

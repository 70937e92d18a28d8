"""Saves, loads and verifies one checkpoint without a manager, in the layout that managers use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax

from holdfast.multihost import Group, default_group

from .errors import StepExists
from .format.limits import check_item_name, check_step
from .format.rename import Names
from .layouts.detect import open_checkpoint, restore_checkpoint
from .layouts.inspection import Structure, structure_of
from .options import Options
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions, VerifyReport
from .saving.commit import SaveTarget, run_protocol
from .saving.save import SnapshotWork
from .saving.stager import SaveRequest, SaveStager
from .steps.claims import FOLDER, Writer
from .steps.object_claims import open_claims
from .steps.opening import give_up_claim, open_root
from .storage.base import Storage
from .storage.path import StorePath, open_storage
from .storage.tombstone import RECORD_NAME


def save(
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    item: str = "state",
    items: Mapping[str, Any] | None = None,
    step: int = 0,
    metadata: Any = None,
    overwrite: bool = False,
    group: Group | None = None,
    timeout_s: float = 600.0,
    layout: Literal["holdfast", "orbax"] = "holdfast",
    per_process: Callable[[str], bool] | None = None,
) -> None:
    """Saves a tree as a checkpoint in the folder `path`, durably; blocks until it is there. Every process of the group calls it.

    It is the item `item`; `items` instead of a state names several, as in `CheckpointManager.save`.
    `per_process` says which leaves each process keeps for itself (see Options).

    With `layout="orbax"` it is a checkpoint of Orbax's, which its v0 manager (as a step folder of a root) and its v1 functions restore.

    Raises StepExists where one is there (unless `overwrite`), UnsupportedLeaf, SaveFailed naming the process that failed, CheckpointError
    for a folder that cannot be written; on every process alike. `group=None` is the job's processes, or this one alone.
    """
    group = group if group is not None else default_group()
    if (state is None) == (items is None):
        raise ValueError("save: give either a state or items")
    chosen = {item: state} if items is None else dict(items)
    if layout == "orbax":
        from .layouts.orbax.write import save_orbax

        save_orbax(StorePath.of(path), chosen, metadata=metadata, group=group, timeout_s=timeout_s)
        return
    if group.count == 1:
        check_step(step), [check_item_name(name) for name in chosen]
    storage = open_storage(path)
    claims = open_claims(storage)
    options = Options(save_timeout_s=timeout_s, per_process=per_process)
    writer = open_root(storage, claims, group, options).writer
    try:
        _save(_stage(storage, group, options, writer, chosen, step, metadata, overwrite), storage, group, options, writer)
    finally:
        if group.index == 0:
            give_up_claim(storage, claims, writer)


def _stage(
    storage: Storage, group: Group, options: Options, writer: Writer, items: dict[str, Any], step: int, metadata: Any, overwrite: bool
) -> SaveRequest:
    """Returns the request with the tree; in a group an error is in it, so that all learn of it."""
    request = SaveRequest(0, 0, writer.id, overwrite)
    try:
        request = replace(request, step=check_step(step))
        if group.index == 0 and not overwrite:
            _refuse_existing(storage)
        return SaveStager(storage, group, options).stage(request, items, None, metadata)
    except Exception as error:
        if group.count == 1:
            raise
        return replace(request, broken=error)


def _save(request: SaveRequest, storage: Storage, group: Group, options: Options, writer: Writer) -> None:
    claim, messages = f"{FOLDER}/{writer.id}", f"checkpoint/save/{writer.id}"
    target = SaveTarget(storage, group, request.key, "", claim, messages, options.save_timeout_s, request.overwrite)
    try:
        result = run_protocol(target, SnapshotWork(request, target, options))
    finally:
        request.release()
    if result.error is not None:
        raise result.error


def _refuse_existing(storage: Storage) -> None:
    if any(entry.name == RECORD_NAME for entry in storage.list("")):
        message = f"{storage.root} holds a checkpoint already; save to another folder, or pass overwrite=True"
        raise StepExists(message, path=storage.root)


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    item: str = "state",
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
    plain: bool = False,
    rename: Names = None,
    host_memory_bytes: int | None = None,
    process: int | None = None,
) -> Any:
    """Restores one item of the checkpoint in the folder `path`, or of the latest step where it is a root of steps (the log says which).

    The checkpoint may be holdfast's, Orbax's, or a safetensors file or folder. The arguments mean what they mean for
    `CheckpointManager.restore`; `rename` turns the paths of stored leaves into those of `like`: a mapping, rules of (pattern,
    replacement), or a function. Each process of a job may call it, with shardings of its own devices or of all. Raises StepNotFound,
    TreeMismatch, Corrupt, HostileCheckpoint, StepGone.
    """
    selection = PerProcessSelection(jax.process_index(), jax.process_count()) if process is None else PerProcessSelection(process)
    options = RestoreOptions(
        partial=partial, cast=cast, types=types, plain=plain, per_process=selection, host_memory_bytes=host_memory_bytes
    )
    return restore_checkpoint(open_checkpoint(path), item, like, options, rename=rename)


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads every byte of the checkpoint in `path` (of a root: its latest step) and checks it; raises as `load` does."""
    return open_checkpoint(path).verify()


def structure(path: str | os.PathLike[str], step: int | None = None) -> Structure:
    """Returns what the checkpoint in `path` holds (of a root: the step `step`, None: the latest), without reading an array; blocks.

    `load(path, structure(path).items["state"].tree)` restores as saved, where the devices allow it. Raises as `load` does.
    """
    return structure_of(open_checkpoint(path, step))

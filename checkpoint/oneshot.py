"""Saves, loads and verifies one checkpoint without a manager, in the layout that managers use."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, default_group

from .errors import CheckpointError, CommitUnknown, StepExists, failure_of, naming_path
from .format.files import other_step
from .format.limits import check_item_name, check_step, copy_json
from .format.record import read_record
from .format.rename import Names
from .layouts.base import CheckpointReader
from .layouts.detect import find_checkpoint, is_single_file, open_checkpoint, open_found, restore_checkpoint
from .options import Options
from .restoring.agreement import RestoreAgreement, ask_primary
from .restoring.match import spans_processes
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions, VerifyReport
from .saving.commit import commit_record
from .saving.pack_writer import write_snapshot
from .saving.plan import Plan
from .saving.plan_mismatch import PlansDiffer, check_reports, explain, receive_result
from .saving.planner import Planner
from .saving.protocol import SaveReport, SaveResult, check_save_reports
from .saving.record_builder import build_record
from .saving.snapshot import take_snapshot
from .steps.claims import FOLDER, Writer
from .steps.object_claims import open_claims
from .steps.opening import give_up_claim, open_root
from .storage.base import Storage
from .storage.path import StorePath, join, open_storage, split
from .storage.tombstone import RECORD_NAME

log = logging.getLogger("holdfast.checkpoint")


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    item: str = "state",
    step: int = 0,
    metadata: Any = None,
    overwrite: bool = False,
    group: Group | None = None,
    timeout_s: float = 600.0,
    layout: Literal["holdfast", "orbax"] = "holdfast",
    per_process: Callable[[str], bool] | None = None,
) -> None:
    """Saves a tree as a checkpoint in the folder `path`, durably; blocks until it is there. Every process of the group calls it.

    `per_process` says which leaves each process keeps for itself (see Options).

    With `layout="orbax"` it is a checkpoint of Orbax's, which its v0 manager (as a step folder of a root) and its v1 functions restore.

    Raises StepExists where one is there (unless `overwrite`), UnsupportedLeaf, SaveFailed naming the process that failed, CheckpointError
    for a folder that cannot be written; on every process alike. `group=None` is the job's processes, or this one alone.
    """
    check_item_name(item)
    step, metadata = check_step(step), copy_json(metadata, "the metadata")
    name = split(os.fspath(path))[1]
    if other_step(step, name) is not None:
        raise ValueError(
            f"save: the folder {name} is called as step {name} is, and step={step}: no reader would take it; rename one of them"
        )
    group = group if group is not None else default_group()
    if layout == "orbax":
        from .layouts.orbax.write import save_orbax

        save_orbax(StorePath.of(path), {item: state}, metadata=metadata, group=group, timeout_s=timeout_s)
        return
    storage = open_storage(path)
    claims = open_claims(storage)
    writer = open_root(storage, claims, group, Options(save_timeout_s=timeout_s)).writer
    try:
        planner = Planner.of_group(group, max_file_bytes=storage.max_file_bytes, per_process=per_process)
        _save(storage, group, writer, planner, item, state, step, metadata, overwrite, timeout_s)
    finally:
        if group.index == 0:
            give_up_claim(storage, claims, writer)


def _save(
    storage: Storage,
    group: Group,
    writer: Writer,
    planner: Planner,
    item: str,
    state: Any,
    step: int,
    metadata: Any,
    overwrite: bool,
    timeout_s: float,
) -> None:
    name, started_s, plan, own_error = f"checkpoint/save/{writer.id}", time.time(), None, None
    try:
        if group.index == 0 and not overwrite:
            _refuse_existing(storage)
        plan = planner.plan(state)
        report = write_snapshot(take_snapshot(plan, state), storage, "", item, writer.id)
        message = SaveReport(group.index, 0, step, {item: report})
    except Exception as error:
        own_error = error
        message = SaveReport.of_error(group.index, 0, step, error)
    gathered = group.gather(f"{name}/report", message.to_bytes(), timeout_s=timeout_s)
    if gathered is None:
        result = receive_result(group, name, {item: plan} if plan is not None else {}, timeout_s)
    else:
        result = _commit(storage, writer, item, plan, gathered, step, metadata, started_s, overwrite)
        if isinstance(result.error, PlansDiffer):
            result = SaveResult(step, explain(group, name, result.error, plan))
        group.broadcast(f"{name}/outcome", result.to_bytes(), timeout_s=timeout_s)
    if result.error is not None:
        if not isinstance(result.error, CommitUnknown):
            _drop_own(storage, item, writer, group.index)
        if isinstance(own_error, HoldfastError) and group.count == 1:
            raise own_error
        raise result.error from own_error


def _refuse_existing(storage: Storage) -> None:
    if any(entry.name == RECORD_NAME for entry in storage.list("")):
        message = f"{storage.root} holds a checkpoint already; save to another folder, or pass overwrite=True"
        raise StepExists(message, path=storage.root)


def _commit(
    storage: Storage,
    writer: Writer,
    item: str,
    plan: Plan | None,
    gathered: Sequence[bytes],
    step: int,
    metadata: Any,
    started_s: float,
    overwrite: bool,
) -> SaveResult:
    try:
        reports = [SaveReport.from_bytes(data) for data in gathered]
        check_save_reports(reports, 0, step)
        assert plan is not None
        items = [report.items[item] for report in reports]
        check_reports(item, plan, items)
        record = build_record(
            step,
            {item: (plan, items)},
            writer=writer.id,
            processes=len(reports),
            started_s=started_s,
            finished_s=time.time(),
            metadata=metadata,
        )
        old = _old_names(storage) if overwrite else []
        commit_record(storage, "", record, f"{FOLDER}/{writer.id}", writer.id, replace=overwrite)
        try:
            storage.delete([name for name in old if f"-{writer.id}." not in name])
        except OSError as error:  # it is saved; what it was before may lie beside it
            log.warning("what %s held before could not be deleted: %s", storage.root, error)
        return SaveResult(step)
    except Exception as error:
        return SaveResult(step, failure_of(error, step, 0))


def _old_names(storage: Storage) -> list[str]:
    try:
        return read_record(storage, "").file_names()
    except CheckpointError:
        return []


def _drop_own(storage: Storage, item: str, writer: Writer, rank: int) -> None:
    """Deletes what this process wrote of a save that failed."""
    start, end = f"{item}/{rank:05d}-", f"-{writer.id}.safetensors"
    names = [entry.name for entry in storage.list(item) if entry.name.startswith(start) and entry.name.endswith(end)]
    storage.delete([*names, f"{item}/"])


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    item: str = "state",
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
    rename: Names = None,
    host_memory_bytes: int | None = None,
    process: int | None = None,
    group: Group | None = None,
    timeout_s: float = 600.0,
) -> Any:
    """Restores one item of the checkpoint in the folder `path`, or of the latest step where it is a root of steps (the log says which).

    The checkpoint may be holdfast's, Orbax's, or a safetensors file or folder. The arguments mean what they mean for
    `CheckpointManager.restore`; `rename` turns the paths of stored leaves into those of `like`: a mapping, rules of (pattern,
    replacement), or a function.

    Without a `group` each process of a job may call it by itself, with shardings of its own devices or of all; of a root only with those of
    its own, since each takes the latest step that it sees. With a group every process calls it: all take the step that the primary finds,
    and end alike (see `CheckpointManager.restore`), waiting for each other for at most `timeout_s`. Blocks. Raises StepNotFound,
    TreeMismatch, Corrupt, HostileCheckpoint, StepGone, CheckpointError where the store cannot be read, ValueError for a root and a `like`
    that spans processes without a group.
    """
    rank, count = (jax.process_index(), jax.process_count()) if group is None else (group.index, group.count)
    selection = PerProcessSelection(rank, count) if process is None else PerProcessSelection(process)
    options = RestoreOptions(partial=partial, cast=cast, types=types, per_process=selection, host_memory_bytes=host_memory_bytes)
    if group is not None:
        return _load_alike(path, item, like, options, rename, group, timeout_s)
    with naming_path(os.fspath(path)):
        return restore_checkpoint(_open_alone(path, like), item, like, options, rename=rename)


def _open_alone(path: str | os.PathLike[str], like: Any) -> CheckpointReader:
    if spans_processes(like) and not is_single_file(path):
        folder, _ = find_checkpoint(open_storage(path))
        if folder.name:
            raise ValueError(
                f"load: {os.fspath(path)} is a root of steps, and `like` spans processes: each would take the latest step that it sees, "
                f"here {folder}; pass group=holdfast.multihost.default_group(), or the folder of one step"
            )
    return open_checkpoint(path)


def _load_alike(
    path: str | os.PathLike[str], item: str, like: Any, options: RestoreOptions, rename: Names, group: Group, timeout_s: float
) -> Any:
    """Loads on all processes of a group what the primary finds; it ends alike on all."""
    where = os.fspath(path)
    name = f"checkpoint/load/{hashlib.sha256(where.encode()).hexdigest()[:16]}"

    def find() -> str:
        with naming_path(where):
            return "" if is_single_file(path) else find_checkpoint(open_storage(path))[0].name

    def restore() -> Any:
        checkpoint = open_checkpoint(path) if is_single_file(path) else open_found(StorePath(open_storage(path), folder))
        agreement.opened(checkpoint.info.save_id)
        return restore_checkpoint(checkpoint, item, like, options, rename=rename)

    folder = ask_primary(group, f"{name}/folder", find, timeout_s)
    agreement = RestoreAgreement(group, name, f"the item {item!r} of {join(where, folder)}", timeout_s)
    value, verdict = agreement.run(restore, where)
    if verdict.error is not None:
        raise verdict.error
    return value


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads every byte of the checkpoint in `path` (of a root: its latest step) and checks it; raises as `load` does."""
    with naming_path(os.fspath(path)):
        return open_checkpoint(path).verify()

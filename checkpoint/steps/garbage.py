"""Sweeps what dead writers left.

The order of a deletion makes it safe at every moment: the record first (the step is gone, durably),
then the packs that it named. The order of a sweep too: packs are listed, then the claims, then the
commits of writers without a claim are stopped, then the record is read. A pack whose writer has no
claim then, and that the record does not name, can never be committed: its writer was fenced, or
closed after its last commit.

A step that has a record, and packs of one save alone, is not looked into: to read every record at
every opening would cost more than what it could find, packs beside the record of a save that wrote
none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CheckpointError, StepNotFound
from ..format.record import read_record
from ..storage.base import Storage
from ..storage.path import join, open_storage
from ..storage.tombstone import RECORD_NAME
from .claims import Claims, Writer, may_fence, this_writer, writer_of
from .holds import forget_marks, list_marks
from .object_claims import open_claims
from .step_files import StepFiles, delete_files, list_files, list_steps_files

_log = logging.getLogger(__name__)


@dataclass
class Swept:
    """What a sweep did: writers fenced, with the reasons, files deleted, and claims that stand."""

    fenced: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)


class Fencing(NamedTuple):
    """Why other writers were fenced, and which were not: they live, or may live."""

    reasons: list[str]
    others: list[Writer]


def fence_others(claims: Claims, me: Writer, *, force: bool = False) -> Fencing:
    """Takes the claims of others away where that is right, or with `force` all.

    Raises Fenced where `me` is a lower attempt of its job.
    """
    reasons = []
    others = []
    for other, dead in claims.others(me.id):
        if force:
            reason = f"writer {other.id} was fenced by force"
        else:
            reason = may_fence(other, me, dead=dead)
        if reason:
            claims.fence(other.id)
            reasons.append(reason)
            _log.info("%s: fenced", reason)
        else:
            others.append(other)
    return Fencing(reasons, others)


def sweep_files(
    storage: Storage, claims: Claims, *, listed: Collection[str] | None = None
) -> list[str]:
    """Deletes packs that no record names, of writers without a claim; returns their names.

    Folders that are then empty go too.
    `listed` are the names of all files of the root, from a listing before this call: an opening
    has one, and the order of a sweep asks only that it is older than the look at the claims.
    """
    steps = list_steps_files(storage, listed)
    marks = list_marks(storage, listed)
    # Listed after packs and marks: a claim is older than its packs, so a pack whose claim is not
    # found now has no writer that could still commit it.
    standing = claims.standing()
    forget_marks(storage, [name for name, mark in marks.items() if mark[2] not in standing])
    return _sweep_steps(storage, claims, steps, standing)


def sweep_step(storage: Storage, claims: Claims, step_dir: str) -> list[str]:
    """Does what `sweep_files` does for one step, or for the folder of a one-shot save ("")."""
    steps = {step_dir: list_files(storage, step_dir)}
    return _sweep_steps(storage, claims, steps, claims.standing())


def _sweep_steps(
    storage: Storage, claims: Claims, steps: Mapping[str, StepFiles], standing: set[str]
) -> list[str]:
    """Sweeps steps whose files were listed before the claims that are `standing`."""
    deleted: list[str] = []
    for step_dir, files in steps.items():
        names = _delete_suspects(storage, claims, step_dir, files, standing)
        if storage.posix is not None and step_dir and (names or not files.packs):
            _delete_empty(storage, step_dir)
        deleted += [join(step_dir, name) for name in names]
    claims.forget_fenced()
    return deleted


def _delete_suspects(
    storage: Storage, claims: Claims, step_dir: str, files: StepFiles, standing: set[str]
) -> Sequence[str]:
    """Deletes packs of one step that no writer can still commit; returns their names."""
    writers = {name: writer_of(save_id) for name, save_id in files.packs.items()}
    suspects = [name for name, writer in writers.items() if writer not in standing]
    if not suspects or (files.has_record and len(set(files.packs.values())) == 1):
        return []
    names = _unnamed(storage, step_dir, suspects)
    if not names:
        return []
    names = claims.bury(step_dir, {name: writers[name] for name in names})
    # Looked at once more: a commit that was under way has come to its end only now.
    names = _unnamed(storage, step_dir, names)
    delete_files(storage, step_dir, names)
    return names


def _unnamed(storage: Storage, step_dir: str, names: Sequence[str]) -> Sequence[str]:
    """Returns the files that a step's record does not name, all without a record; none where the
    record is damaged, or may be there.
    """
    # In an object store `bury` reads the record, and changes it on condition that it is the same.
    if storage.posix is None:
        return names
    try:
        named = set(read_record(storage, step_dir).file_names())
    except StepNotFound:
        # A client of a shared file system may not find a record that is there. It is believed only
        # where a listing shows other files of the step, and no record beside them.
        listed = [entry.name for entry in storage.list(step_dir)]
        return names if listed and join(step_dir, RECORD_NAME) not in listed else []
    except CheckpointError as error:
        _log.warning("%s is left as it is: %s", join(storage.root, step_dir), error)
        return []
    return [name for name in names if name not in named]


def _delete_empty(storage: Storage, step_dir: str) -> None:
    """Removes empty folders: a writer may die after it made a folder, before it made a file."""
    # Where a file is left, at any depth, the folders may be somebody else's.
    if storage.list(step_dir, recursive=True, names_only=True):
        return
    # Folders alone: a writer may have saved the step since that listing.
    names = [entry.name for entry in storage.list(step_dir, names_only=True)]
    storage.delete([name for name in names if name.endswith("/")] + [f"{step_dir}/"])


def sweep(path: str | os.PathLike[str], *, force: bool = False) -> Swept:
    """Fences the dead writers of a root (with `force` all) and deletes their unfinished saves.

    One-shot saves too. Never touches steps that have a record, Orbax's or foreign files, or,
    without `force`, the saves of a manager that lives. Blocks. Raises CheckpointError where the
    root cannot be read or written.
    """
    storage = open_storage(path)
    claims = open_claims(storage)
    try:
        fenced = fence_others(claims, this_writer(), force=force).reasons
        deleted = [*sweep_step(storage, claims, ""), *sweep_files(storage, claims)]
        return Swept(fenced, deleted, sorted(claims.standing()))
    except OSError as error:
        raise CheckpointError(
            f"{storage.root} cannot be swept: {error}; expected a root that this process may write"
            " to. What was swept before stays so: sweep again",
            path=storage.root,
        ) from error

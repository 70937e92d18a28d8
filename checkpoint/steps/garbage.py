"""Sweeps what dead writers left.

The order of a deletion makes it safe at every moment: the record first (the step is gone, durably),
then the packs that it named. The order of a sweep too: packs are listed, then the claims, then the
record is read. A pack whose writer has no claim then, and that the record does not name, can never
be committed: its writer was fenced, or closed after its last commit.

A step that has a record, and packs of one save alone, is not looked into: to read every record at
every opening would cost more than what it could find, packs beside the record of a save that wrote
none.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from ..errors import CheckpointError, StepNotFound
from ..format.record import read_record
from ..format.step_folders import step_folders
from ..storage.base import Storage
from ..storage.path import join, open_storage
from ..storage.tombstone import RECORD_NAME
from .claims import Claims, Writer, may_fence, this_writer
from .object_claims import open_claims
from .step_files import delete_files, list_packs

_log = logging.getLogger(__name__)
_WRITER_DIGITS = 8  # of a save's id, which begins with its writer's


@dataclass
class Swept:
    """What a sweep did: writers fenced, each with the reason; files deleted; claims left
    standing.
    """

    fenced: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)


def fence_others(claims: Claims, me: Writer, *, force: bool = False) -> list[str]:
    """Takes the claims of others away where that is right, or with `force` all; returns why. Raises
    Fenced if we are the older.
    """
    reasons = []
    for other, dead in claims.others(me.id):
        if reason := (f"writer {other.id} was fenced by force" if force else "") or may_fence(
            other, me, dead=dead
        ):
            claims.fence(other.id)
            reasons.append(reason)
            _log.info("%s: fenced", reason)
    return reasons


def sweep_files(storage: Storage, claims: Claims) -> list[str]:
    """Deletes packs of writers without a claim that no record names, and folders that are then
    empty; returns their names.
    """
    deleted: list[str] = []
    without_packs: list[str] = []
    for step_dir in step_folders(storage).values():
        names, is_without_packs = _sweep_packs(storage, claims, step_dir)
        deleted += names
        without_packs += [step_dir] if is_without_packs else []
    claims.forget_fenced(without_packs)
    return deleted


def sweep_step(storage: Storage, claims: Claims, step_dir: str) -> list[str]:
    """Does what `sweep_files` does for one step, or for the folder of a one-shot save ("")."""
    deleted, is_without_packs = _sweep_packs(storage, claims, step_dir)
    claims.forget_fenced([step_dir] if is_without_packs else [])
    return deleted


def _sweep_packs(storage: Storage, claims: Claims, step_dir: str) -> tuple[list[str], bool]:
    """Returns what it has deleted, and whether no packs were there."""
    packs, has_record = list_packs(storage, step_dir)
    standing = claims.standing()
    suspects = {
        name: save_id[:_WRITER_DIGITS]
        for name, save_id in packs.items()
        if save_id[:_WRITER_DIGITS] not in standing
    }
    names: list[str] = []
    if suspects and not (has_record and len(set(packs.values())) == 1):
        named = _named(storage, step_dir)
        names = [] if named is None else [name for name in suspects if name not in named]
        names = claims.bury(step_dir, names, {suspects[name] for name in names}) if names else []
        delete_files(storage, step_dir, names)
    if step_dir and (names or not packs):
        _delete_empty(storage, step_dir)
    return [join(step_dir, name) for name in names], not packs


def _named(storage: Storage, step_dir: str) -> set[str] | None:
    """Returns the files that a step's record names; none without a record, None (touch nothing)
    where it is damaged, or may be there.

    That a file is not found is believed only where a listing shows what is beside it: a client of a
    shared file system may say so of a file that is there.
    """
    try:
        return set(read_record(storage, step_dir).file_names())
    except StepNotFound:
        names = [entry.name for entry in storage.list(step_dir)]
        return set() if names and join(step_dir, RECORD_NAME) not in names else None
    except CheckpointError as error:
        _log.warning("%s is left as it is: %s", join(storage.root, step_dir), error)
        return None


def _delete_empty(storage: Storage, step_dir: str) -> None:
    """Removes what a writer leaves that died between making a folder and making a file in it."""
    entries = storage.list(step_dir, names_only=True)
    if all(entry.name.endswith("/") for entry in entries):
        storage.delete([entry.name for entry in entries] + [f"{step_dir}/"])


def sweep(path: str | os.PathLike[str], *, force: bool = False) -> Swept:
    """Fences the dead writers of a root (with `force` all writers) and deletes what they left
    unfinished, one-shot saves too.

    Never touches steps that have a record, Orbax's or foreign files, or, without `force`, the saves
    of a manager that lives. Blocks. Raises CheckpointError where the root cannot be read or
    written.
    """
    storage = open_storage(path)
    claims = open_claims(storage)
    try:
        fenced = fence_others(claims, this_writer(), force=force)
        deleted = [*sweep_step(storage, claims, ""), *sweep_files(storage, claims)]
        return Swept(fenced, deleted, sorted(claims.standing()))
    except OSError as error:
        raise CheckpointError(
            f"{storage.root} cannot be swept: {error}; expected a root that this process may write"
            " to. What was swept before stays so: sweep again",
            path=storage.root,
        ) from error

"""What is in a root, and what may go: listing steps, deleting them, and sweeping what dead writers left.

The order of a deletion makes it safe at every moment: the record first (the step is gone, durably), then the packs that it named. The
order of a sweep too: packs are listed, then the claims, then the record is read. A pack whose writer has no claim then, and that the
record does not name, can never be committed: its writer was fenced, or closed after its last commit.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._claims import FOLDER, Claims, Writer, may_fence, this_writer
from ._engine import RECORD_NAME, read_record
from ._errors import CheckpointError, StepNotFound
from ._storage import Storage
from ._stores import open_store

_log = logging.getLogger(__name__)
_STEP = re.compile(r"(?:0|[1-9][0-9]{0,17})/")
_PACK = re.compile(r"\d{5,}-(?:\d{5}|j)-([0-9a-f]{8})(?:[0-9a-f]{8})?\.(?:safetensors|json)")


def step_folders(storage: Storage) -> list[int]:
    """Returns the numbers of all folders that are named like steps, ascending."""
    return sorted(int(entry.name[:-1]) for entry in storage.list("") if _STEP.fullmatch(entry.name))


def has_record(storage: Storage, step: int) -> bool:
    """Says whether a step is there: whether its record is."""
    name = f"{step}/{RECORD_NAME}"
    return any(entry.name == name for entry in storage.list(str(step)))


def list_steps(storage: Storage) -> list[int]:
    """Returns the steps of a root, ascending; a folder without a record is no step."""
    return [step for step in step_folders(storage) if has_record(storage, step)]


def delete_files(storage: Storage, step: int, names: Sequence[str]) -> None:
    """Deletes files of a step, by names relative to it, and then its folders where they are empty."""
    items = {name.rpartition("/")[0] for name in names} - {""}
    storage.delete([f"{step}/{name}" for name in names] + [f"{step}/{item}/" for item in sorted(items)] + [f"{step}/"])


def delete_own(storage: Storage, step: int, items: Sequence[str], process: int, tag: str) -> None:
    """Deletes what one process wrote of a save that failed. Never call it while a commit may be under way."""
    prefix, own = f"{process:05d}-", []
    for item in items:
        for entry in storage.list(f"{step}/{item}"):
            name = entry.name.rpartition("/")[2]
            if name.startswith(prefix) and name.partition(".")[0].endswith(f"-{tag}"):
                own.append(f"{item}/{name}")
    delete_files(storage, step, own or [f"{item}/" for item in items])


def pack_names(storage: Storage, step: int) -> list[str]:
    """Returns the files of a step that look like ours, by names relative to it."""
    return [name for name, _ in _packs(storage, step)]


def _packs(storage: Storage, step: int) -> list[tuple[str, str]]:
    """Returns (name relative to the step, writer id) of each file that looks like one of ours."""
    found = []
    for folder in storage.list(str(step)):
        if folder.name.endswith("/"):
            for entry in storage.list(folder.name.rstrip("/")):
                if match := _PACK.fullmatch(entry.name.rpartition("/")[2]):
                    found.append((entry.name.removeprefix(f"{step}/"), match[1]))
    return found


@dataclass
class Swept:
    """What a sweep did: writers fenced, each with the reason; files deleted; claims left standing."""

    fenced: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)


def fence_others(claims: Claims, me: Writer, *, force: bool = False) -> list[str]:
    """Takes the claims of others away where that is right, or with `force` all; returns why. Raises Fenced if we are the older."""
    reasons = []
    for other, dead in claims.others(me.id):
        if reason := (f"writer {other.id} was fenced by force" if force else "") or may_fence(other, me, dead=dead):
            claims.fence(other.id)
            reasons.append(reason)
            _log.info("%s: fenced", reason)
    return reasons


def sweep_files(storage: Storage, claims: Claims) -> list[str]:
    """Deletes packs of writers without a claim that no record names, and folders that are then empty; returns their names."""
    gone: list[str] = []
    bare: list[int] = []
    for step in step_folders(storage):
        packs = _packs(storage, step)
        standing = claims.standing()
        suspects = [(name, writer) for name, writer in packs if writer not in standing]
        if suspects and (named := _named(storage, step)) is not None:
            names = [name for name, _ in suspects if name not in named]
            names = claims.bury(step, names, {writer for name, writer in suspects if name in names}) if names else []
            delete_files(storage, step, names)
            gone += [f"{step}/{name}" for name in names]
        if not packs or suspects:
            _delete_empty(storage, step)
        if not packs:
            bare.append(step)
    claims.forget_fenced(bare)
    return gone


def _named(storage: Storage, step: int) -> set[str] | None:
    """Returns the files that a step's record names; none without a record, None (touch nothing) where it is damaged."""
    try:
        return set(read_record(storage, str(step)).file_names())
    except StepNotFound:
        return set()
    except CheckpointError as error:
        _log.warning("step %d is left as it is: %s", step, error)
        return None


def _delete_empty(storage: Storage, step: int) -> None:
    """Removes what a writer leaves that died between making a folder and making a file in it."""
    entries = storage.list(str(step))
    if all(entry.name.endswith("/") for entry in entries):
        storage.delete([entry.name for entry in entries] + [f"{step}/"])


def sweep(path: str | os.PathLike[str], *, force: bool = False) -> Swept:
    """Fences the dead writers of a root (with `force` all writers) and deletes what they left unfinished.

    Never touches steps that have a record, Orbax's or foreign files, or, without `force`, the saves of a manager that lives. Blocks.
    """
    store, claims = open_store(path)
    fenced = fence_others(claims, this_writer(), force=force)
    return Swept(fenced, sweep_files(store, claims), sorted(claims.standing()))


__all__ = [
    "FOLDER",
    "Swept",
    "delete_files",
    "delete_own",
    "fence_others",
    "has_record",
    "list_steps",
    "pack_names",
    "step_folders",
    "sweep",
    "sweep_files",
]

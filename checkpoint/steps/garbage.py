"""Deletes steps, sweeps what dead writers left, and has a worker that does such jobs in the
background.

The order of a deletion makes it safe at every moment: the record first (the step is gone, durably),
then the packs that it named. The order of a sweep too: packs are listed, then the claims, then the
record is read. A pack whose writer has no claim then, and that the record does not name, can never
be committed: its writer was fenced, or closed after its last commit.

A step that has a record, and packs of one save alone, is not looked into: to read every record at
every opening would cost more than what it could find, packs beside the record of a save that wrote
none.
"""

from __future__ import annotations

import collections
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError, StepNotFound
from ..format.files import read_step_names, step_folders
from ..format.record import read_record
from ..storage.base import Storage
from ..storage.path import join, open_storage
from ..storage.threads import Latch, start_thread
from ..storage.tombstone import RECORD_NAME
from .claims import FOLDER, Claims, Writer, may_fence, this_writer
from .object_claims import open_claims

_log = logging.getLogger(__name__)
KEPT_FAILURES = 16  # jobs of a worker; what more there is the next manager sweeps
_PACK = re.compile(r"\d{5,}-(?:\d{5}|j)-([0-9a-f]{8}(?:[0-9a-f]{8})?)\.(?:safetensors|json|bin)")
_WRITER_DIGITS = 8  # of a save's id, which begins with its writer's


def delete_files(storage: Storage, folder: str, names: Sequence[str]) -> None:
    """Deletes files of a step, by names relative to its folder ("" for the root), and then its
    folders where they are empty.
    """
    items = {name.rpartition("/")[0] for name in names} - {""}
    own = [f"{folder}/"] if folder else []
    storage.delete(
        [join(folder, name) for name in names]
        + [join(folder, item) + "/" for item in sorted(items)]
        + own
    )


def pack_names(storage: Storage, step_dir: str) -> list[str]:
    """Returns the files of a step that look like ours, by names relative to it."""
    return list(_packs(storage, step_dir)[0])


def _packs(storage: Storage, step_dir: str) -> tuple[dict[str, str], bool]:
    """Returns each file that looks like one of ours, by its name relative to the step, and the id
    of its save; and if a record is there.
    """
    prefix = f"{step_dir}/" if step_dir else ""
    entries = [entry.name for entry in storage.list(step_dir, names_only=True)]
    folders = [name[:-1] for name in entries if name.endswith("/")]
    if not step_dir:  # the items of a one-shot save: folders beside them may be steps
        names = read_step_names(storage)
        folders = [name for name in folders if names.step_of(name) is None and name != FOLDER]
    found = {}
    for folder in folders:
        for entry in storage.list(folder, names_only=True):
            if match := _PACK.fullmatch(entry.name.rpartition("/")[2]):
                found[entry.name.removeprefix(prefix)] = match[1]
    return found, f"{prefix}{RECORD_NAME}" in entries


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
    packs, has_record = _packs(storage, step_dir)
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


class BackgroundWorker:
    """Does jobs one after the other, in a daemon thread that ends with the last. Thread-safe.

    A job that fails is logged, not raised, and tried once more when the next job comes.
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[str, Callable[[], object]]] = collections.deque()
        self._lock = threading.Lock()
        self._failed: list[tuple[str, Callable[[], object]]] = []
        self._running = False
        self._idle: Latch | None = None  # None: no job was put since the last ended

    def put(self, what: str, job: Callable[[], object]) -> None:
        """Adds a job; `what` names it in the log."""
        with self._lock:
            self._idle = self._idle or Latch()
            self._jobs.extend([*self._failed, (what, job)])
            self._failed.clear()
        self._start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until no job is left; returns whether that is so."""
        self._start()
        idle = self._idle
        return idle is None or idle.wait(timeout_s)

    def drop(self) -> None:
        """Forgets the jobs that have not begun: the next manager sweeps."""
        with self._lock:
            self._jobs.clear()

    def _start(self) -> None:
        """Starts the thread where there is none for the jobs; after an interrupt of `put` too."""
        if self._jobs and not self._running:
            start_thread(self._run)

    def _run(self) -> None:
        with self._lock:
            if self._running:
                return
            self._running = True
        threading.current_thread().name = "holdfast-background"
        while (next_job := self._take()) is not None:
            what, job = next_job
            try:
                job()
            except Exception as error:
                _log.warning("%s failed, it is tried again later: %s", what, error)
                with self._lock:
                    self._failed = [*self._failed, (what, job)][-KEPT_FAILURES:]

    def _take(self) -> tuple[str, Callable[[], object]] | None:
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._running = False
            if self._idle is not None:
                self._idle.set()
                self._idle = None
            return None

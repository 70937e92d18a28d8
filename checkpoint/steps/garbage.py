"""Deletes steps, sweeps what dead writers left, and has a worker that does such jobs in the background.

The order of a deletion makes it safe at every moment: the record first (the step is gone, durably), then the packs that it named. The
order of a sweep too: packs are listed, then the claims, then the record is read. A pack whose writer has no claim then, and that the
record does not name, can never be committed: its writer was fenced, or closed after its last commit.
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
from ..format.files import step_folders
from ..format.record import read_record
from ..storage.base import Storage
from ..storage.path import join, open_storage
from .claims import Claims, Writer, may_fence, this_writer
from .object_claims import open_claims

_log = logging.getLogger(__name__)
KEPT_FAILURES = 16  # jobs of a worker; what more there is the next manager sweeps
_PACK = re.compile(r"\d{5,}-(?:\d{5}|j)-([0-9a-f]{8})(?:[0-9a-f]{8})?\.(?:safetensors|json)")


def delete_files(storage: Storage, folder: str, names: Sequence[str]) -> None:
    """Deletes files of a step, by names relative to its folder ("" for the root), and then its folders where they are empty."""
    items = {name.rpartition("/")[0] for name in names} - {""}
    own = [f"{folder}/"] if folder else []
    storage.delete([join(folder, name) for name in names] + [join(folder, item) + "/" for item in sorted(items)] + own)


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
    deleted: list[str] = []
    without_packs: list[int] = []
    for step in step_folders(storage):
        packs = _packs(storage, step)
        standing = claims.standing()
        suspects = [(name, writer) for name, writer in packs if writer not in standing]
        if suspects and (named := _named(storage, step)) is not None:
            names = [name for name, _ in suspects if name not in named]
            names = claims.bury(step, names, {writer for name, writer in suspects if name in names}) if names else []
            delete_files(storage, str(step), names)
            deleted += [f"{step}/{name}" for name in names]
        if not packs or suspects:
            _delete_empty(storage, step)
        if not packs:
            without_packs.append(step)
    claims.forget_fenced(without_packs)
    return deleted


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
    storage = open_storage(path)
    claims = open_claims(storage)
    fenced = fence_others(claims, this_writer(), force=force)
    return Swept(fenced, sweep_files(storage, claims), sorted(claims.standing()))


class BackgroundWorker:
    """Does jobs one after the other, in a daemon thread that ends with the last. Thread-safe.

    A job that fails is logged, not raised, and tried once more when the next job comes.
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[str, Callable[[], object]]] = collections.deque()
        self._changed = threading.Condition()
        self._failed: list[tuple[str, Callable[[], object]]] = []
        self._running = False

    def put(self, what: str, job: Callable[[], object]) -> None:
        """Adds a job; `what` names it in the log."""
        with self._changed:
            self._jobs.extend([*self._failed, (what, job)])
            self._failed.clear()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="holdfast-background", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until no job is left; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def drop(self) -> None:
        """Forgets the jobs that have not begun: the next manager sweeps."""
        with self._changed:
            self._jobs.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running = False
                    self._changed.notify_all()
                    return
                what, job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                _log.warning("%s failed, it is tried again later: %s", what, error)
                with self._changed:
                    self._failed = [*self._failed, (what, job)][-KEPT_FAILURES:]

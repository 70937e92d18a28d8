"""The files of a step that are ours: lists and deletes them, and deletes steps: first the record,
durably, then in the background the packs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from ..format.item_report import FILE_NAME
from ..format.record import fetch_record, parse_record
from ..format.step_folders import PLAIN_NAMES, STEP_NAMES, read_step_names, step_folders
from ..options import Statistics
from ..storage.base import Storage
from ..storage.path import join
from ..storage.retries import until
from ..storage.tombstone import RECORD_NAME, is_sealed
from .background import BackgroundWorker
from .claims import FOLDER

_log = logging.getLogger(__name__)
LOOKS = 8  # at a folder that is empty
FILES_S = 60.0  # for the packs of a deleted step; what stays is tried once more, or swept


def delete_files(storage: Storage, folder: str, names: Sequence[str]) -> None:
    """Deletes files of a step, and then its folders where they are empty.

    The names are relative to the step's folder ("" for the root).
    """
    items = {name.rpartition("/")[0] for name in names} - {""}
    paths = [join(folder, name) for name in names]
    paths += [join(folder, item) + "/" for item in sorted(items)]
    if folder:
        paths.append(f"{folder}/")
    storage.delete(paths)


@dataclass(frozen=True)
class StepFiles:
    """The files of a step that look like ours: the id of the save of each pack, by the pack's name.

    Names are relative to the step's folder.
    """

    packs: dict[str, str]
    has_record: bool


def list_steps_files(
    storage: Storage, listed: Collection[str] | None = None
) -> dict[str, StepFiles]:
    """Lists the files of all steps of a root, by the names of their folders.

    In an object store that is one listing of everything, or `listed`, where it was made before.
    """
    if storage.posix is not None:
        folders = step_folders(storage, read_step_names(storage)).values()
        return {folder: list_files(storage, folder) for folder in folders}
    if listed is None:
        listed = {entry.name for entry in storage.list("", recursive=True, names_only=True)}
    step_names = read_step_names(storage) if STEP_NAMES in listed else PLAIN_NAMES
    by_step: dict[str, list[str]] = {}
    for path in sorted(listed):
        step_dir, _, name = path.partition("/")
        if step_names.step_of(step_dir) is not None:
            by_step.setdefault(step_dir, []).append(name)
    return {step_dir: _files_among(names) for step_dir, names in by_step.items()}


def _files_among(names: Collection[str]) -> StepFiles:
    """Returns those of the names of a step's files, relative to its folder, that look like ours."""
    packs = {
        name: match[3]
        for name in names
        if name.count("/") == 1 and (match := FILE_NAME.fullmatch(name.partition("/")[2]))
    }
    return StepFiles(packs, has_record=RECORD_NAME in names)


def list_files(storage: Storage, step_dir: str) -> StepFiles:
    """Lists the files of a step, without a look at any file."""
    prefix = f"{step_dir}/" if step_dir else ""
    names = [entry.name for entry in storage.list(step_dir, names_only=True)]
    folders = [name[:-1] for name in names if name.endswith("/")]
    if not step_dir:  # the items of a one-shot save: folders beside them may be steps
        step_names = read_step_names(storage)
        folders = [name for name in folders if step_names.step_of(name) is None and name != FOLDER]
    for folder in folders:
        names += [entry.name for entry in storage.list(folder, names_only=True)]
    return _files_among([name.removeprefix(prefix) for name in names])


# --- a whole step


@dataclass(frozen=True)
class StepDeleter:
    """Deletes steps of a root, at the primary. Thread-safe."""

    storage: Storage
    worker: BackgroundWorker
    statistics: Statistics

    def delete(self, step: int, folder: str, end_s: float) -> OSError | None:
        """Deletes a step's record now, until `end_s` by the monotonic clock; returns why it stays.
        A step whose record stays is tried again after the next save.
        """
        storage = until(self.storage, end_s)
        record = f"{folder}/{RECORD_NAME}"
        try:
            names = self._file_names(storage, folder)
            storage.delete([record])
            # A client of a shared file system may not find, and so not delete, what is there.
            if not _is_without(storage, folder, record):
                raise OSError(errno.EIO, "its record does not go", record)
        except OSError as error:
            _log.warning(
                "step %d could not be deleted, it is tried again after the next save: %s",
                step,
                error,
            )
            return error
        self.worker.put(f"deleting step {step}", lambda: self._delete_files(folder, names()))
        return None

    def _file_names(self, storage: Storage, folder: str) -> Callable[[], list[str]]:
        """Returns a function that gives the names of a step's files, after its record is gone.

        The names are those in the record, or of a damaged step all files that look like ours.
        """
        with contextlib.suppress(CheckpointError):
            data = fetch_record(storage, folder)
            if is_sealed(data):
                return lambda: self._named(data, folder)
        names = list(list_files(storage, folder).packs)
        return lambda: names

    def _named(self, record: bytes, folder: str) -> list[str]:
        try:
            return parse_record(record, join(self.storage.root, folder)).file_names()
        except CheckpointError:
            # Its checksum is right, and what it says is nothing of ours. What lies there by now may
            # be another save's: the next sweep knows.
            return []

    def _delete_files(self, folder: str, names: Sequence[str]) -> None:
        began = time.perf_counter()
        storage = until(self.storage, time.monotonic() + FILES_S)
        delete_files(storage, folder, names)
        self.statistics.add(steps_deleted=1, delete_s=time.perf_counter() - began)


def _is_without(storage: Storage, folder: str, record: str) -> bool:
    """Says whether the record is gone: a listing shows the packs alone, or nothing at all."""
    # An empty folder is listed again: a sweep may be at work there, or the store not show all.
    for _ in range(LOOKS):
        left = [entry.name for entry in storage.list(folder)]
        if left:
            return record not in left
        if f"{folder}/" not in [entry.name for entry in storage.list("")]:
            break
    return True

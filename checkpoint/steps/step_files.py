"""The files of a step that are ours: lists and deletes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..format.item_report import FILE_NAME
from ..format.step_folders import PLAIN_NAMES, STEP_NAMES, read_step_names, step_folders
from ..storage.base import Storage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .claims import FOLDER


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
    found: dict[str, StepFiles] = {}
    if listed is None:
        entries = storage.list("", recursive=True, names_only=True)
        listed = {entry.name for entry in entries}
    names = read_step_names(storage) if STEP_NAMES in listed else PLAIN_NAMES
    for path in sorted(listed):
        step_dir, _, name = path.partition("/")
        if names.step_of(step_dir) is None:
            continue
        files = found.setdefault(step_dir, StepFiles({}, has_record=False))
        match = FILE_NAME.fullmatch(name.rpartition("/")[2])
        if name == RECORD_NAME:
            found[step_dir] = replace(files, has_record=True)
        elif match is not None and name.count("/") == 1:
            files.packs[name] = match[3]
    return found


def list_files(storage: Storage, step_dir: str) -> StepFiles:
    """Lists the files of a step, without a look at any file."""
    prefix = f"{step_dir}/" if step_dir else ""
    entries = [entry.name for entry in storage.list(step_dir, names_only=True)]
    folders = [name[:-1] for name in entries if name.endswith("/")]
    if not step_dir:  # the items of a one-shot save: folders beside them may be steps
        names = read_step_names(storage)
        folders = [name for name in folders if names.step_of(name) is None and name != FOLDER]
    packs = {}
    for folder in folders:
        for entry in storage.list(folder, names_only=True):
            match = FILE_NAME.fullmatch(entry.name.rpartition("/")[2])
            if match is not None:
                packs[entry.name.removeprefix(prefix)] = match[3]
    return StepFiles(packs, has_record=f"{prefix}{RECORD_NAME}" in entries)

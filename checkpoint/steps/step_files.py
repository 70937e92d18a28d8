"""The files of a step that are ours: lists and deletes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..format.step_folders import read_step_names
from ..storage.base import Storage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .claims import FOLDER

_PACK = re.compile(r"\d{5,}-(?:\d{5}|j)-([0-9a-f]{8}(?:[0-9a-f]{8})?)\.(?:safetensors|json|bin)")


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
    return list(list_packs(storage, step_dir)[0])


def list_packs(storage: Storage, step_dir: str) -> tuple[dict[str, str], bool]:
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

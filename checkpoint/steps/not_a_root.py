"""Tells the folder of one step from a root of steps."""

from __future__ import annotations

import contextlib

from ..errors import CheckpointError
from ..format.record import read_record
from ..format.step_folders import has_record
from ..storage.base import Storage
from ..storage.path import open_storage, split
from .claims import FOLDER


def refuse_step_folder(storage: Storage) -> None:
    """Raises CheckpointError where a manager's root is the folder of a step of another root.

    A checkpoint that was saved by itself, as step 0, may be a root.
    """
    if not has_record(storage, ""):
        return
    where = storage.root
    parent, name = split(where)
    try:
        step = read_record(storage, "").step
    except (CheckpointError, OSError):
        step = None  # a record that is damaged does not say whose it is
    if step or _is_root(parent, of=where):
        called = name if step is None else step
        raise CheckpointError(
            f"{where} is the folder of step {called}, and no root of steps: open {parent} and"
            f" restore({called}), or load({where!r})",
            path=where,
            step=step,
        )


def _is_root(folder: str, of: str) -> bool:
    if ("://" in of) != ("://" in folder):
        return False  # above a bucket is nothing
    with contextlib.suppress(OSError):
        return any(entry.name == f"{FOLDER}/" for entry in open_storage(folder).list(""))
    return False

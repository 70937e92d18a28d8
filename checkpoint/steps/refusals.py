"""Refuses what is no root for a manager: the folder of one step, and what another process of the
job writes to, where `initialize()` was forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from holdfast.multihost.group.runtime import launched_spec, unjoined_spec

from ..errors import CheckpointError
from ..format.record import read_record
from ..format.step_folders import has_record, list_steps
from ..storage.base import Storage
from ..storage.path import open_storage, split
from .claims import FOLDER, Writer, this_writer
from .opening import OpenRoot


def refuse_step_folder(storage: Storage) -> None:
    """Raises CheckpointError where a manager's root is the folder of a step of another root.

    A checkpoint that was saved by itself, as step 0, may be a root. So is a folder of steps where
    another program's file bears the record's name.
    """
    if not has_record(storage, ""):
        return
    where = storage.root
    parent, name = split(where)
    try:
        step = read_record(storage, "").step
    except (CheckpointError, OSError):
        step = None  # a record that is damaged does not say whose it is
        if list_steps(storage):
            return
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


def refuse_without_joining(root: OpenRoot) -> None:
    """Raises CheckpointError where this process of a launched job has not joined it, and another
    that lives has the root open for writing.

    Each of them would save alone, over the other's steps.
    """
    if root.is_writing_primary and unjoined_spec() is not None:
        refuse_writers(root.where, root.writer, root.claims.others(root.writer.id))


def refuse_writers(where: str, me: Writer, others: Iterable[tuple[Writer, bool]]) -> None:
    """Raises CheckpointError where this process has not joined its job, and one of the writers of
    `where` is another process of it that lives; each comes with whether it is dead.
    """
    if unjoined_spec() is None:
        return
    for other, is_dead in others:
        is_of_job = (other.job, other.attempt) == (me.job, me.attempt)
        # The same number is this process's parent or child, or its life before a restart.
        if is_of_job and not is_dead and other.process != me.process:
            raise CheckpointError(
                f"{where} is open in process {other.process} of this job (host {other.host},"
                f" pid {other.pid}), and process {me.process} has not joined it: call"
                " holdfast.multihost.initialize() at the start of the program, so that all save as"
                " one, or open another folder in each process",
                path=where,
                process=me.process,
            )


def launched_writer() -> Writer:
    """Returns a new writer for this process, with its place in the job that it was launched in."""
    spec = launched_spec()
    return this_writer(spec.job_id, spec.attempt, spec.process_id) if spec else this_writer()

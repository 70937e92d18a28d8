"""Refuses what is no root for a manager: the folder of one step, and what another process of the
job writes to, where `initialize()` was forgotten. Warns of what is most often a mistake: a path
that is mistyped, and a second writer.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from holdfast.multihost.group.runtime import unjoined_spec

from ..errors import CheckpointError, StepExists
from ..format.record import read_record
from ..format.step_folders import has_record, list_steps
from ..storage.base import Storage
from ..storage.path import open_storage, split
from .claims import FOLDER, Writer
from .file_lock import locks_are_local
from .opening import OpenRoot

_log = logging.getLogger("holdfast.checkpoint")
_MOST_NAMED = 3  # in a message
_LEAST_RATIO = 0.75  # of difflib's, as "epx1" and "exp1" have; "grain-run" and "hang-run" have 0.71


def refuse_step_folder(storage: Storage) -> None:
    """Raises CheckpointError where a manager's root is the folder of a step of another root.

    A checkpoint that was saved by itself, as step 0, may be a root: a warning says that `load`
    takes it for all steps. So is a folder of steps where another program's file bears the record's
    name.
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
    _log.warning(
        "%s holds a checkpoint that was saved by itself: load(%r) gives that one, also where steps"
        " are saved beside it. Give the steps a folder of their own",
        where,
        where,
    )


def refuse_root_of_steps(storage: Storage, steps: Sequence[int]) -> None:
    """Raises StepExists where a checkpoint by itself would come into a root that has steps: `load`
    would take it for all of them.
    """
    if steps and not has_record(storage, ""):
        raise StepExists(
            f"{storage.root} is a root of steps, the latest {steps[-1]}: a checkpoint there by"
            " itself would hide them from load(). Choose a folder of its own, which may be in that"
            " one, or save it as a step: CheckpointManager(...).save(step, tree)",
            path=storage.root,
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
        is_of_job = (other.job, other.attempt, other.launched_ms) == (
            me.job,
            me.attempt,
            me.launched_ms,
        )
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


def warn_of_new_root(storage: Storage) -> None:
    """Warns that a root is about to be made, where there is one with steps of a like path."""
    if storage.posix is None or storage.posix.path.exists():
        return
    if alike := roots_alike(storage):
        _log.warning(
            "%s is not there, and is made as a new root without steps. %s: if that was meant, stop,"
            " and open it",
            storage.root,
            alike,
        )


def warn_of_writers(storage: Storage, others: Sequence[Writer]) -> None:
    """Warns that others, which are not known to be dead, have the root open for writing."""
    if not others:
        return
    doubt = ", if it has not ended without closing: this store cannot tell"
    if storage.posix is not None and not locks_are_local(storage.posix.path):
        doubt = ""
    _log.warning(
        "%s is open for writing already, by %s%s. Two trainers of one root replace and delete each"
        " other's steps: give each a root of its own, or pass Options(read_only=True) to only read",
        storage.root,
        ", ".join(map(_shown, others[:_MOST_NAMED])),
        doubt,
    )


def _shown(writer: Writer) -> str:
    if (writer.host, writer.pid) == (socket.gethostname(), os.getpid()):
        return "this same process"
    job = f" (job {writer.job})" if writer.job else ""
    return f"pid {writer.pid} on host {writer.host}{job}"


def warn_of_absent_root(storage: Storage, files: Collection[str] | None = None) -> None:
    """Warns that there is nothing to read yet; `files` are those of an object store, if known."""
    if not (_is_absent(storage) or (files is not None and not files)):
        return
    alike = roots_alike(storage)
    _log.warning(
        "%s is not there: nothing can be restored from it until a job saves there%s",
        storage.root,
        f". {alike}" if alike else "",
    )


def why_no_steps(storage: Storage) -> str:
    """Returns what is known of a root without steps, to stand behind its path; "" if nothing is."""
    absent = ", which is not there" if _is_absent(storage) else ""
    alike = roots_alike(storage)
    return f"{absent}; {alike}" if alike else absent


def _is_absent(storage: Storage) -> bool:
    return storage.posix is not None and not storage.posix.path.exists()


def roots_alike(storage: Storage) -> str:
    """Returns a sentence on the folders with steps whose paths differ from this root's by a like
    name, in the last part or in the first that is missing; "" where there are none.

    Names with other numbers are others on purpose: the runs of a sweep.
    """
    if storage.posix is None:
        return ""
    folder = level = storage.posix.path
    while level != level.parent and not level.parent.is_dir():
        level = level.parent
    below = folder.relative_to(level)
    paths = [beside / below for beside in _names_like(level)]
    found = [str(path) for path in paths if _has_steps(path)]
    verb = "has" if len(found) == 1 else "have"
    return f"{', '.join(found)} {verb} steps, and much the same name" if found else ""


def _names_like(folder: Path) -> list[Path]:
    """Returns the folders beside one that have a like name, the most alike first."""
    names = {name.casefold(): name for name in _folders_in(folder.parent) if name != folder.name}
    wanted = folder.name.casefold()
    candidates = [name for name in names if _numbers_in(name) == _numbers_in(wanted)]
    alike = difflib.get_close_matches(wanted, candidates, _MOST_NAMED, _LEAST_RATIO)
    return [folder.parent / names[name] for name in alike]


def _numbers_in(name: str) -> list[str]:
    return re.findall(r"[0-9]+", name)


def _has_steps(folder: Path) -> bool:
    return any(name[-1] in "0123456789" for name in _folders_in(folder))


def _folders_in(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield entry.name

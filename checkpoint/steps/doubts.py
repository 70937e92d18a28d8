"""Warns of what is most often a mistake when a root is opened: a path that is mistyped, a second
writer.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ..storage.base import Storage
from .claims import Writer

_log = logging.getLogger("holdfast.checkpoint")
_MOST_NAMED = 3  # in a message
_LEAST_RATIO = 0.7  # of difflib's: "epx1" and "exp1" have 0.75


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
    if storage.posix is None:
        doubt = ", if it has not ended without closing: this store cannot tell"
    else:
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
    names = {name.casefold(): name for name in _folders_in(level.parent) if name != level.name}
    wanted = level.name.casefold()
    candidates = [name for name in names if _numbers_in(name) == _numbers_in(wanted)]
    alike = difflib.get_close_matches(wanted, candidates, _MOST_NAMED, _LEAST_RATIO)
    paths = [level.parent / names[name] / below for name in alike]
    found = [str(path) for path in paths if _has_steps(path)]
    verb = "has" if len(found) == 1 else "have"
    return f"{', '.join(found)} {verb} steps, and much the same name" if found else ""


def _numbers_in(name: str) -> list[str]:
    return re.findall(r"[0-9]+", name)


def _has_steps(folder: Path) -> bool:
    return any(name[-1] in "0123456789" for name in _folders_in(folder))


def _folders_in(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield entry.name

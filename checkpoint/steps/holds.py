"""Holds: files under `.holdfast/holds/` by which a reader keeps a step from being deleted.

A hold's name says all: `<step>-<seconds>-<made>-<id>`. Its time begins when the file is made, and
what its store's clock says counts, now and then, where listings have times. Elsewhere it is
`<made>`, which is Unix seconds of the reader's clock.

A keep policy marks the steps that it lets go, in the same folder, before it looks for holds:
`<step>-goes-<writer>-<id>`. A reader writes its hold before it looks for marks. So one of the two
sees the other, wherever either stops: no step goes that is held, and none is held that goes. A
sweep forgets the marks of dead writers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator, Sequence

from ..errors import CheckpointError
from ..format.step_folders import has_record
from ..storage.base import Entry, Storage
from ..storage.threads import run_side_by_side
from .claims import FOLDER, FULL_ERRORS

_log = logging.getLogger(__name__)
HOLDS = f"{FOLDER}/holds"
_MOST_S = 10**8  # three years
_NAME = re.compile(rf"{re.escape(HOLDS)}/(\d{{1,18}})-(\d{{1,9}})-(\d{{1,12}})-[0-9a-f]{{8}}")
_MARK = re.compile(rf"{re.escape(HOLDS)}/(\d{{1,18}})-goes-([0-9a-f]{{8}})-[0-9a-f]{{8}}")


def take_hold(storage: Storage, step: int, folder: str, seconds: float) -> str:
    """Holds a step that is there for `seconds` (rounded up): no keep policy deletes it. Returns the
    hold's name, "" where the step is gone, or a keep policy lets it go.

    Raises CheckpointError where it cannot be written, and the store's OSError.
    """
    name = add_hold(storage, step, seconds)
    is_held = False
    try:
        going = {int(mark[1]) for mark in list_marks(storage).values()}
        is_held = step not in going and has_record(storage, folder)
    finally:
        if not is_held:
            drop_hold(storage, name)
    return name if is_held else ""


def add_hold(storage: Storage, step: int, seconds: float) -> str:
    """Writes a hold of `seconds` (rounded up), whether or not the step stays; returns its name.

    Raises CheckpointError where it cannot be written.
    """
    held_s = int(min(seconds, _MOST_S)) + 1
    name = f"{HOLDS}/{step}-{held_s}-{int(time.time())}-{secrets.token_hex(4)}"
    try:
        _write(storage, name)
    except OSError as error:
        raise CheckpointError(
            f"step {step} of {storage.root} cannot be held: {error}; expected a root that this"
            " process may write to. To read without a hold, pass hold_s=0",
            path=storage.root,
            step=step,
        ) from error
    return name


def drop_hold(storage: Storage, name: str) -> None:
    """Ends a hold before its time; where that fails, it ends by itself."""
    try:
        storage.delete([name])
    except OSError as error:
        _log.warning(
            "the hold %s of %s stays until its time is over: %s", name, storage.root, error
        )


@contextlib.contextmanager
def hold(storage: Storage, step: int, folder: str, seconds: float) -> Iterator[bool]:
    """Holds a step while the block runs, for at most `seconds`; yields whether it is held."""
    name = take_hold(storage, step, folder, seconds)
    try:
        yield bool(name)
    finally:
        if name:
            drop_hold(storage, name)


@contextlib.contextmanager
def letting_go(storage: Storage, steps: Sequence[int], writer_id: str) -> Iterator[list[int]]:
    """Yields those of the steps that a keep policy lets go that no reader holds, to be deleted in
    the block: while it runs nobody takes a hold on them. Raises the store's OSError.
    """
    names = _mark(storage, steps, writer_id)
    if not names:
        yield list(steps)
        return
    entries = storage.list(HOLDS)
    held = _held_among(storage, entries)
    try:
        yield [step for step in steps if step not in held]
    finally:
        # Those too that an earlier error has left.
        marks = list_marks(storage, [entry.name for entry in entries])
        own = [name for name, mark in marks.items() if mark[2] == writer_id]
        forget_marks(storage, own)


def list_marks(storage: Storage, listed: Collection[str] | None = None) -> dict[str, re.Match[str]]:
    """Returns the marks of steps that are let go, by name; the groups are step and writer.

    `listed` are the names of all files of the root, or of the folder, where they are known.
    """
    if listed is None:
        listed = [entry.name for entry in storage.list(HOLDS, names_only=True)]
    return {name: mark for name in listed if (mark := _MARK.fullmatch(name))}


def forget_marks(storage: Storage, names: Sequence[str]) -> None:
    """Deletes marks, and their folder where it is empty then; where that fails, they wait for their
    writer, or for a sweep.
    """
    if not names:
        return
    try:
        storage.delete([*names, f"{HOLDS}/"])
    except OSError as error:
        _log.warning("marks in %s/%s stay for now: %s", storage.root, HOLDS, error)


def held_steps(storage: Storage) -> set[int]:
    """Returns the steps that are held now, and forgets holds that are long over."""
    return _held_among(storage, storage.list(HOLDS))


def _mark(storage: Storage, steps: Sequence[int], writer_id: str) -> list[str]:
    """Returns the marks that it writes; none where something else stands than their folder: nobody
    can hold a step there either. A full disk may have room for none: what is let go makes some.
    """
    names = [f"{HOLDS}/{step}-goes-{writer_id}-{secrets.token_hex(4)}" for step in steps]
    try:
        run_side_by_side(lambda name: _write(storage, name), names, storage.max_concurrency)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return []
        if error.errno not in FULL_ERRORS:
            raise
    return names


def _write(storage: Storage, name: str) -> None:
    storage.write(name, 1, [(0, [memoryview(b"\n")])])


def _held_among(storage: Storage, entries: Collection[Entry]) -> set[int]:
    holds = [(each, match) for each in entries if (match := _NAME.fullmatch(each.name))]
    held = set()
    over = []
    now_s = time.time()
    if any(entry.modified_s for entry, _ in holds):
        now_s = _now_of(storage)
    for entry, match in holds:
        step, seconds, made = map(int, match.groups())
        since_s = now_s if entry.modified_s else time.time()
        if since_s < (entry.modified_s or made) + seconds:
            held.add(step)
        else:
            over.append(entry.name)
    with contextlib.suppress(OSError):  # what cannot be forgotten is over nevertheless
        storage.delete(over)
    return held


def _now_of(storage: Storage) -> float:
    """Returns the time by the store's clock, of a file that is made for it; by this host's where
    that cannot be made.
    """
    name = f"{HOLDS}/now-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        try:
            _write(storage, name)
            times = [entry.modified_s for entry in storage.list(HOLDS) if entry.name == name]
        finally:
            storage.delete([name])
        if times and times[0]:
            return times[0]
    return time.time()

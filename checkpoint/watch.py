"""Waits for the steps that another job writes, and goes through them, each held while it is
used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.coordination.deadline import Deadline

from .errors import naming_path
from .format.step_folders import (
    LOOKS,
    PLAIN_NAMES,
    has_record,
    read_hint,
    read_step_names,
    root_folders,
)
from .steps.holds import hold
from .steps.left_behind import Mark, goes_on_from, identify_own, left_among, read_marks
from .steps.refusals import warn_of_absent_root
from .storage.base import Storage
from .storage.path import open_storage

FULL_EVERY = 30  # polls of a bucket: it is then listed though its hint is the same
POLL_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # waits between polls of the store; the last one repeats


def wait_for_new_step(
    directory: str | os.PathLike[str], after: int | None = None, *, timeout_s: float = 3600.0
) -> int | None:
    """Waits for a step newer than `after` (None: for any) and returns the newest there is; None
    when none came in `timeout_s`. Blocks.

    Where the job has gone back, and has left `after` behind, steps are newer that it has saved
    since, whatever their numbers. Raises CheckpointError where the store cannot be read.

    It polls the store itself: for one process that evaluates what a job trains. It needs no manager
    and no claim. In a bucket a poll is one GET of what the last save has left as a hint. A step
    without a hint (of a one-shot save, or copied there) is seen within FULL_EVERY polls.
    """
    storage = open_storage(directory)
    with naming_path(storage.root):
        newest = _wait(_WatchedRoot(storage, after), Deadline(timeout_s))
    return newest.step if newest is not None else None


def iterate_steps(
    directory: str | os.PathLike[str],
    *,
    after: int | None = None,
    timeout_s: float = 3600.0,
    hold_s: float = 3600.0,
    skip_to_newest: bool = True,
) -> Iterator[int]:
    """Yields steps as they come, ascending, and ends when none has come for `timeout_s`. Where the
    job has gone back to an older step, those come that it has saved since, again ascending.

    Each step is held while the loop's body runs, for at most `hold_s`: no keep policy deletes it
    meanwhile (0: it is not held, for a store that this process cannot write to). A step that a keep
    policy is about to delete is not yielded. With `skip_to_newest` steps that were overtaken are
    left out; else each one is yielded that is still there. Raises CheckpointError where the store
    cannot be read.
    """
    # Not in the generator, which begins with the loop: the path is that of this call.
    storage = open_storage(directory)
    return _iterate(storage, after, timeout_s, hold_s, skip_to_newest=skip_to_newest)


def _iterate(
    storage: Storage, after: int | None, timeout_s: float, hold_s: float, *, skip_to_newest: bool
) -> Iterator[int]:
    with naming_path(storage.root):
        root = _WatchedRoot(storage, after)
        while (newest := _wait(root, Deadline(timeout_s))) is not None:
            fresh = [newest] if skip_to_newest else root.fresh()
            for found in fresh:
                with _held(storage, found, hold_s) as is_there:
                    if is_there:
                        yield found.step
                root.seen(found)


@contextlib.contextmanager
def _held(storage: Storage, found: _FoundStep, hold_s: float) -> Iterator[bool]:
    """Holds a step, where it is to be held; yields whether it is there."""
    if hold_s > 0:
        with hold(storage, found.step, found.folder, hold_s) as is_there:
            yield is_there
    else:
        yield has_record(storage, found.folder)


def _wait(root: _WatchedRoot, deadline: Deadline) -> _FoundStep | None:
    polls = 0
    while True:
        newest = root.newest()
        if newest is not None:
            return newest
        if deadline.passed():
            return None
        time.sleep(min(deadline.remaining_s(), POLL_S[min(polls, len(POLL_S) - 1)]))
        polls += 1


class _FoundStep(NamedTuple):
    """A step that is there, and the id of its save."""

    step: int
    folder: str
    save: str


class _WatchedRoot:
    """A root that is polled for steps newer than `after` (None: than none).

    While nothing is new there, a poll is one listing of its folders and one of its marks, or one
    read of a bucket's hint.
    """

    def __init__(self, storage: Storage, after: int | None) -> None:
        warn_of_absent_root(storage)
        self._storage = storage
        self._after = after
        self._save = ""  # the id of its save; known once it was seen here
        self._listed: list[str] | None = None
        self._names = PLAIN_NAMES
        self._hint: bytes | None = None
        self._unlisted = 0  # polls since the last listing

    def seen(self, found: _FoundStep) -> None:
        """Notes that what comes after this step is new from now on."""
        self._after = found.step
        self._save = found.save

    def newest(self) -> _FoundStep | None:
        """Returns the newest step, if there is one to be found."""
        if not self._is_due():
            return None
        before: list[int] | None = None
        for _ in range(LOOKS):
            newer = self._newer()
            found = next(filter(None, map(self._found, newer)), None)
            # A writer may delete the newest listed step, for one that is newer still, before its
            # record is looked for. Without a folder, or with the same ones again, none was there.
            if not newer or (found is not None and found.step == newer[0]) or newer == before:
                return found
            before = newer
        return None

    def fresh(self) -> list[_FoundStep]:
        """Returns all new steps, ascending."""
        return list(filter(None, map(self._found, reversed(self._newer()))))

    def _is_due(self) -> bool:
        if self._storage.posix is not None:
            return True
        # Read before the listing: what is saved after it has another hint.
        hint = read_hint(self._storage)
        is_due = hint is None or hint != self._hint or self._unlisted + 1 >= FULL_EVERY
        self._hint = hint
        self._unlisted = 0 if is_due else self._unlisted + 1
        return is_due

    def _found(self, step: int) -> _FoundStep | None:
        """Returns a step, None where it is not there."""
        folder = self._names.name_of(step)
        save = identify_own(self._storage, folder)
        if not save and not has_record(self._storage, folder):
            return None
        return _FoundStep(step, folder, save)

    def _newer(self) -> list[int]:
        """Returns the steps that folders are named as, and that are newer; descending. None of them
        was left behind.
        """
        steps = self._folders()
        # After the listing: a mark comes before the first step of its branch.
        marks = read_marks(self._storage)
        if self._after is not None:
            save = self._save or self._save_now(self._after, marks)
            floor = goes_on_from(marks, self._after, save)
            steps = [step for step in steps if step > floor]
        left = self._left_among(steps, marks)
        return [step for step in steps if step not in left]

    def _save_now(self, step: int, marks: list[Mark]) -> str:
        """Returns the id of a step that is known by its number alone, "" where it is not there, or
        was left behind.
        """
        if not any(step in mark.steps for mark in marks) or self._left_among([step], marks):
            return ""
        found = self._found(step)
        return "" if found is None else found.save

    def _left_among(self, steps: list[int], marks: list[Mark]) -> set[int]:
        folders = {step: self._names.name_of(step) for step in steps}
        return left_among(self._storage, folders, marks)

    def _folders(self) -> list[int]:
        """Returns the steps that the root's folders are named as, descending."""
        listed = root_folders(self._storage)
        if listed != self._listed:
            # Who begins the root says how its steps are called, together with its first folder.
            self._names = read_step_names(self._storage)
            self._listed = listed
        steps = map(self._names.step_of, listed)
        return sorted((step for step in steps if step is not None), reverse=True)

"""Waits for the steps that another job writes, and goes through them, each held while it is
used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from .format.step_folders import (
    LOOKS,
    PLAIN_NAMES,
    has_record,
    list_steps,
    read_hint,
    read_step_names,
)
from .steps.holds import add_hold, drop_hold
from .storage.base import Storage
from .storage.path import open_storage

FULL_EVERY = 30  # polls of a bucket: it is then listed though its hint is the same
POLL_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # waits between polls of the store; the last one repeats


def wait_for_new_step(
    directory: str | os.PathLike[str], after: int | None = None, *, timeout_s: float = 3600.0
) -> int | None:
    """Waits for a step newer than `after` (None: for any) and returns the newest there is; None
    when none came in `timeout_s`. Blocks.

    It polls the store itself: for one process that evaluates what a job trains. It needs no manager
    and no claim. In a bucket a poll is one GET of what the last save has left as a hint. A step
    without a hint (of a one-shot save, or copied there) is seen within FULL_EVERY polls.
    """
    return _wait(open_storage(directory), after, time.monotonic() + timeout_s)


def iterate_steps(
    directory: str | os.PathLike[str],
    *,
    after: int | None = None,
    timeout_s: float = 3600.0,
    hold_s: float = 3600.0,
    skip_to_newest: bool = True,
) -> Iterator[int]:
    """Yields steps as they come, ascending, and ends when none has come for `timeout_s`.

    Each step is held while the loop's body runs, for at most `hold_s`: no keep policy deletes it
    meanwhile (0: it is not held, for a store that this process cannot write to). With
    `skip_to_newest` steps that were overtaken are left out; else each one is yielded that is still
    there.
    """
    storage = open_storage(directory)
    while (newest := _wait(storage, after, time.monotonic() + timeout_s)) is not None:
        names = read_step_names(storage)
        fresh = [newest]
        if not skip_to_newest:
            fresh = [step for step in list_steps(storage, names) if after is None or step > after]
        for step in fresh:
            name = add_hold(storage, step, hold_s) if hold_s > 0 else ""
            try:
                if has_record(storage, names.name_of(step)):  # it may have gone before it was held
                    yield step
            finally:
                if name:
                    drop_hold(storage, name)
            after = step


def _wait(storage: Storage, after: int | None, deadline: float) -> int | None:
    watched = _WatchedRoot(storage, after)
    polls = 0
    while True:
        newest = watched.newest()
        if newest is not None:
            return newest
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        time.sleep(min(remaining_s, POLL_S[min(polls, len(POLL_S) - 1)]))
        polls += 1


class _WatchedRoot:
    """A root that is polled for steps newer than `after` (None: than none).

    While nothing is new there, a poll is one listing of its folders, or one read of a bucket's
    hint.
    """

    def __init__(self, storage: Storage, after: int | None) -> None:
        self._storage = storage
        self._after = after
        self._listed: list[str] | None = None
        self._names = PLAIN_NAMES
        self._hint: bytes | None = None
        self._unlisted = 0  # polls since the last listing

    def newest(self) -> int | None:
        """Returns the newest step, if there is one to be found."""
        return self._look() if self._is_due() else None

    def _is_due(self) -> bool:
        if self._storage.posix is not None:
            return True
        # Read before the listing: what is saved after it has another hint.
        hint = read_hint(self._storage)
        is_due = hint is None or hint != self._hint or self._unlisted + 1 >= FULL_EVERY
        self._hint = hint
        self._unlisted = 0 if is_due else self._unlisted + 1
        return is_due

    def _look(self) -> int | None:
        after = self._after
        before: list[int] | None = None
        for _ in range(LOOKS):
            newer = [step for step in self._folders() if after is None or step > after]
            found = next((step for step in newer if self._has_record(step)), None)
            # A writer may delete the newest listed step, for one that is newer still, before its
            # record is looked for. Without a folder, or with the same ones again, none was there.
            if not newer or found == newer[0] or newer == before:
                return found
            before = newer
        return None

    def _has_record(self, step: int) -> bool:
        return has_record(self._storage, self._names.name_of(step))

    def _folders(self) -> list[int]:
        """Returns the steps that the root's folders are named as, descending."""
        listed = [entry.name for entry in self._storage.list("", names_only=True)]
        if listed != self._listed:
            # Who begins the root says how its steps are called, together with its first folder.
            self._names = read_step_names(self._storage)
            self._listed = listed
        steps = [self._names.step_of(name[:-1]) for name in listed if name.endswith("/")]
        return sorted([step for step in steps if step is not None], reverse=True)

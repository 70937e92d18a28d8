"""Waits for the steps that another job writes, and goes through them, each held while it is
used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from .format.step_folders import LOOKS, PLAIN_NAMES, has_record, list_steps, read_step_names
from .steps.holds import add_hold, drop_hold
from .storage.base import Storage
from .storage.path import open_storage

POLL_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # waits between polls of the store; the last one repeats


def wait_for_new_step(
    directory: str | os.PathLike[str], after: int | None = None, *, timeout_s: float = 3600.0
) -> int | None:
    """Waits for a step newer than `after` (None: for any) and returns the newest there is; None
    when none came in `timeout_s`. Blocks.

    It polls the store itself: for one process that evaluates what a job trains. It needs no manager
    and no claim.
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
    watched = _WatchedRoot(storage)
    polls = 0
    while True:
        newest = watched.newest(after)
        if newest is not None:
            return newest
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        time.sleep(min(remaining_s, POLL_S[min(polls, len(POLL_S) - 1)]))
        polls += 1


class _WatchedRoot:
    """A root that is polled: while nothing is new there, a poll is one listing of its folders."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._listed: list[str] | None = None
        self._names = PLAIN_NAMES

    def newest(self, after: int | None) -> int | None:
        """Returns the newest step, if it is newer than `after` (None: than none)."""
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

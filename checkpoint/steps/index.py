"""Knows the steps of a root, and which of them the keep policy lets go."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from crc32c import crc32c

from ..errors import CheckpointError
from ..format.record import Record, fetch_record, is_sealed, parse_record, read_record
from ..format.step_folders import PLAIN_NAMES, StepNames, has_record
from ..options import Statistics
from ..policy import (
    KeepAll,
    KeepPolicy,
    StepFacts,
    best_by_metric,
    to_delete,
    unknown_metrics,
)
from ..storage.base import Storage
from ..storage.local import hold
from ..storage.path import join
from ..storage.retries import until
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME
from .background import BackgroundWorker
from .claims import writer_of
from .step_files import delete_files, list_files

_log = logging.getLogger(__name__)
LOOKS = 8  # at a folder that is empty
_MOST_METRICS = 8  # of one step, for those who watch
FILES_S = 60.0  # for the packs of a deleted step; what stays is tried once more, or swept
MOST_HELD = 16  # records of deleted steps whose bytes are held, each by an open file


class SavedStep(NamedTuple):
    """What is known of how a step was saved."""

    nbytes: int = 0
    incremental: bool = False  # what had not changed was linked
    saved_unix_s: float = 0.0
    took_s: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields of CheckpointStep; of the metrics the first that are finite."""
        finite = [(name, value) for name, value in self.metrics.items() if math.isfinite(value)]
        return {
            "bytes": self.nbytes,
            "incremental": self.incremental,
            "saved_unix_s": self.saved_unix_s,
            "took_s": self.took_s,
            "metrics": dict(finite[:_MOST_METRICS]),
        }


class StepIndex:
    """The known steps of a root, alike on every process of a group. Thread-safe.

    Those that were left behind may be steps of other libraries too. With `deletes`
    (at the primary) it deletes steps too. A process that `is_alone` shares its knowledge with no
    other process, and may look at the store instead.
    """

    def __init__(
        self,
        storage: Storage,
        keep_policy: KeepPolicy,
        steps: Iterable[int],
        worker: BackgroundWorker,
        statistics: Statistics,
        *,
        deletes: bool,
        is_alone: bool = False,
        names: StepNames = PLAIN_NAMES,
    ) -> None:
        self._storage = storage
        self._is_alone = is_alone
        self._names = names
        self._keep_policy = keep_policy
        self.worker = worker
        self.statistics = statistics
        self._deletes = deletes
        # None: the record was not read yet
        self._facts: dict[int, StepFacts | None] = dict.fromkeys(steps)
        self._marked: set[int] = set()
        self._stored: dict[int, SavedStep] = {}
        self._left_behind: set[int] = set()
        self._passed_over: set[int] = set()
        self._held = 0
        self._has_warned = False
        self._lock = threading.Lock()

    def __contains__(self, step: int) -> bool:
        with self._lock:
            return step in self._facts

    def exists(self, step: int, *, end_s: float = math.inf) -> bool:
        """Says whether a step is there, by what all processes know.

        A process alone looks at the store, until `end_s` by the monotonic clock, and raises the
        store's OSError.
        """
        if self._is_alone:
            return has_record(until(self._storage, end_s), self.folder(step))
        return step in self

    def folder(self, step: int) -> str:
        """Returns the name of a step's folder."""
        return self._names.name_of(step)

    def steps(self) -> list[int]:
        """Returns the known steps, ascending."""
        with self._lock:
            return sorted(self._facts)

    def left_behind(self) -> set[int]:
        """Returns the steps that were left behind."""
        with self._lock:
            return set(self._left_behind)

    def leave(self, steps: Iterable[int]) -> None:
        """Knows steps as left behind."""
        with self._lock:
            self._left_behind.update(steps)

    def note_marked(self, steps: Iterable[int]) -> None:
        """Notes steps that the primary has marked as left, for `leave_marked`."""
        with self._lock:
            self._marked.update(steps)

    def leave_marked(self) -> bool:
        """Knows what was marked as left behind, once the save that leaves it is there; says whether
        that is news. Until then, and where that fails until the next save, all know the same.
        """
        with self._lock:
            is_news = not self._marked <= self._left_behind
            self._left_behind |= self._marked
            self._marked = set()
            return is_news

    def add(self, committed: StepFacts) -> None:
        """Adds a committed step."""
        with self._lock:
            self._facts[committed.step] = committed
            self._passed_over.discard(committed.step)
            self._left_behind.discard(committed.step)

    def learn(self, step: int) -> None:
        """Knows a step that a commit has found: one of another writer, or of an own save whose
        outcome was not known.
        """
        with self._lock:
            self._facts.setdefault(step, None)

    def pass_over(self, step: int) -> None:
        """Notes that an older step was restored instead of this one: it may be saved again."""
        with self._lock:
            self._passed_over.add(step)

    def was_passed_over(self, step: int) -> bool:
        """Says whether a step was passed over and not saved since: a save may replace it."""
        with self._lock:
            return step in self._passed_over

    def stored(self) -> dict[int, SavedStep]:
        """Returns what the records that were read say of how their steps were saved."""
        with self._lock:
            return dict(self._stored)

    def best_by_metric(self) -> dict[str, int]:
        """Returns the best step by each metric that the keep policy judges by."""
        with self._lock:
            known = [facts for facts in self._facts.values() if facts is not None]
        return best_by_metric(self._keep_policy, known)

    def crc(self) -> int:
        """Returns the CRC of the known steps: processes whose CRCs are equal know the same."""
        return crc32c(f"{self.steps()} {sorted(self.left_behind())}".encode())

    def adopt(self, steps: Iterable[int]) -> None:
        """Knows these steps from now on, and no others: the primary's list."""
        with self._lock:
            self._facts = {step: self._facts.get(step) for step in steps}

    def adopt_left(self, steps: Iterable[int]) -> None:
        """Knows these steps as left behind from now on, and no others: the primary's list."""
        with self._lock:
            self._marked = set()
            self._left_behind = set(steps)

    def superfluous(self, new: StepFacts, *, end_s: float = math.inf) -> list[int]:
        """Returns the steps that the keep policy lets go once `new`, which stays, is committed,
        unless they are held.

        Reads the store, until `end_s` by the monotonic clock: for the primary.
        """
        if isinstance(self._keep_policy, KeepAll):
            return []
        with self._lock:
            after = self._facts | {new.step: new}
            left = self._left_behind - {new.step}
        storage = until(self._storage, end_s)
        unread = [step for step, facts in after.items() if facts is None]
        read = run_side_by_side(
            lambda step: self._read(storage, step), unread, storage.max_concurrency
        )
        known = [facts for facts in [*after.values(), *read] if facts is not None]
        self._warn_of_metrics(known)
        going = to_delete(self._keep_policy, known, left_behind=left)
        return [step for step in going if step != new.step]

    def _warn_of_metrics(self, known: Sequence[StepFacts]) -> None:
        """Warns, once, of metrics that the keep policy asks for and no step has."""
        if self._has_warned:
            return
        for sentence in unknown_metrics(self._keep_policy, known):
            _log.warning("%s: %s", self._storage.root, sentence)
            self._has_warned = True

    def _read(self, storage: Storage, step: int) -> StepFacts | None:
        """Reads what the keep policy needs; None: the record is damaged, its step always stays."""
        try:
            record = read_record(storage, self.folder(step))
        except (CheckpointError, OSError):
            return None
        facts = facts_of(step, record)
        with self._lock:
            if step in self._facts:  # else it was deleted meanwhile
                self._facts[step] = facts
                self._stored[step] = saved_step_of(record)
        return facts

    def remove(self, steps: Sequence[int], *, end_s: float = math.inf) -> dict[int, OSError]:
        """Forgets steps; returns those that remain, and why.

        The primary deletes their records now, until `end_s` by the monotonic clock, and their packs
        in the background.
        """
        remaining = {}
        storage = until(self._storage, end_s)
        for step in steps:
            error = self._delete(storage, step) if self._deletes else None
            if error is not None:
                remaining[step] = error
        with self._lock:
            for step in set(steps) - set(remaining):
                self._facts.pop(step, None)
                self._left_behind.discard(step)
                self._stored.pop(step, None)
        return remaining

    def _delete(self, storage: Storage, step: int) -> OSError | None:
        """Deletes a step's record; a step whose record stays is tried again after the next save."""
        folder = self.folder(step)
        record = f"{folder}/{RECORD_NAME}"
        release = self._hold(record)
        try:
            names = self._file_names(storage, folder)
            storage.delete([record])
            # A client of a shared file system may not find, and so not delete, what is there.
            if not _is_without(storage, folder, record):
                raise OSError(errno.EIO, "its record does not go", record)
        except OSError as error:
            _log.warning(
                "step %d could not be deleted, it is tried again after the next save: %s",
                step,
                error,
            )
            release()
            return error
        self.worker.put(f"closing the record of step {step}", release, is_due=True)
        self.worker.put(f"deleting step {step}", lambda: self._delete_files(folder, names()))
        return None

    def _hold(self, record: str) -> Callable[[], None]:
        """Keeps the bytes of a record until the returned function is called, once; of at most
        MOST_HELD at a time.
        """
        with self._lock:
            if self._held == MOST_HELD:
                return lambda: None
            self._held += 1
        close = hold(self._storage, record)

        def release() -> None:
            close()
            with self._lock:
                self._held -= 1

        return release

    def _file_names(self, storage: Storage, folder: str) -> Callable[[], list[str]]:
        """Returns a function that gives the names of a step's files, after its record is gone.

        The names are those in the record, or of a damaged step all files that look like ours.
        """
        with contextlib.suppress(CheckpointError):
            data = fetch_record(storage, folder)
            if is_sealed(data):
                return lambda: self._named_or_listed(data, folder)
        names = list(list_files(storage, folder).packs)
        return lambda: names

    def _named_or_listed(self, record: bytes, folder: str) -> list[str]:
        try:
            return parse_record(record, join(self._storage.root, folder)).file_names()
        except CheckpointError:  # its checksum is right, and what it says is nothing of ours
            return list(list_files(self._storage, folder).packs)

    def _delete_files(self, folder: str, names: Sequence[str]) -> None:
        began = time.perf_counter()
        storage = until(self._storage, time.monotonic() + FILES_S)
        delete_files(storage, folder, names)
        self.statistics.add(steps_deleted=1, delete_s=time.perf_counter() - began)


def _is_without(storage: Storage, folder: str, record: str) -> bool:
    """Says whether the record is gone: a listing shows the packs alone, or nothing at all."""
    # An empty folder is listed again: a sweep may be at work there, or the store not show all.
    for _ in range(LOOKS):
        left = [entry.name for entry in storage.list(folder)]
        if left:
            return record not in left
        if f"{folder}/" not in [entry.name for entry in storage.list("")]:
            break
    return True


def facts_of(step: int, record: Record) -> StepFacts:
    """Returns what keep policies decide by, of a step with this record."""
    return StepFacts(step, dict(record.metrics), record.started_s, writer_of(record.writer_id))


def saved_step_of(record: Record) -> SavedStep:
    """Returns what a record says of how its step was saved."""
    return SavedStep(
        sum(leaf.nbytes for item in record.items.values() for leaf in item.leaves),
        saved_unix_s=record.finished_s,
        took_s=record.finished_s - record.started_s,
        metrics=dict(record.metrics),
    )

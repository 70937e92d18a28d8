"""Knows the steps of a root, and which of them the keep policy lets go."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from crc32c import crc32c

from ..errors import CheckpointError
from ..format.record import fetch_record, is_sealed, parse_record, read_record
from ..format.step_folders import PLAIN_NAMES, StepNames, has_record
from ..options import Statistics
from ..policy import KeepAll, KeepPolicy, StepFacts, to_delete
from ..storage.base import Storage
from ..storage.local import hold
from ..storage.path import join
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME
from .background import BackgroundWorker
from .holds import held_steps
from .step_files import delete_files, pack_names

_log = logging.getLogger(__name__)
LOOKS = 8  # at a folder that is empty


class StepIndex:
    """The known steps of a root, alike on every process of a group; the primary's deletes them.
    Thread-safe.

    A process that `is_alone` has nobody to know the same as, and may look instead.
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
        self._worker = worker
        self._statistics = statistics
        self._deletes = deletes
        self._facts: dict[int, StepFacts | None] = dict.fromkeys(
            steps
        )  # None: the record was not read yet
        self._passed_over: set[int] = set()
        self._lock = threading.Lock()

    def __contains__(self, step: int) -> bool:
        with self._lock:
            return step in self._facts

    def exists(self, step: int) -> bool:
        """Says whether a step is there: by what all know, alone by a look at the store, whose
        OSError it raises.
        """
        return has_record(self._storage, self.folder(step)) if self._is_alone else step in self

    def folder(self, step: int) -> str:
        """Returns the name of a step's folder."""
        return self._names.name_of(step)

    def steps(self) -> list[int]:
        """Returns the known steps, ascending."""
        with self._lock:
            return sorted(self._facts)

    def add(self, committed: StepFacts) -> None:
        """Adds a committed step."""
        with self._lock:
            self._facts[committed.step] = committed
            self._passed_over.discard(committed.step)

    def pass_over(self, step: int) -> None:
        """Notes that a step could not be restored, on some process, and an older one was instead:
        it may be saved again.
        """
        with self._lock:
            self._passed_over.add(step)

    def was_passed_over(self, step: int) -> bool:
        """Says whether a step may be replaced by a save that does not say so: it was passed over,
        and not saved since.
        """
        with self._lock:
            return step in self._passed_over

    def crc(self) -> int:
        """Returns the CRC of the known steps: processes whose CRCs are equal know the same."""
        return crc32c(",".join(map(str, self.steps())).encode())

    def adopt(self, steps: Iterable[int]) -> None:
        """Knows these steps from now on, and no others: the primary's list."""
        with self._lock:
            self._facts = {step: self._facts.get(step) for step in steps}

    def superfluous(self, new: StepFacts) -> list[int]:
        """Returns the steps that the keep policy lets go once `new` is committed, which stays.
        Reads the store: for the primary.
        """
        if isinstance(self._keep_policy, KeepAll):
            return []
        with self._lock:
            after = self._facts | {new.step: new}
        unread = [step for step, facts in after.items() if facts is None]
        read = run_side_by_side(self._read, unread, self._storage.max_concurrency) if unread else []
        known = [facts for facts in [*after.values(), *read] if facts is not None]
        return to_delete(self._keep_policy, known, held=held_steps(self._storage) | {new.step})

    def _read(self, step: int) -> StepFacts | None:
        """Reads what the keep policy needs; None for a step whose record is damaged: it is never
        touched.
        """
        try:
            record = read_record(self._storage, self.folder(step))
            found = StepFacts(step, dict(record.metrics), record.started_s)
        except (CheckpointError, OSError):
            return None
        self.add(found)
        return found

    def remove(self, steps: Sequence[int]) -> dict[int, OSError]:
        """Forgets steps; the primary deletes their records now, and their packs in the background.
        Returns those that remain, and why.
        """
        remaining = {
            step: error for step in steps if self._deletes and (error := self._delete(step))
        }
        with self._lock:
            for step in set(steps) - set(remaining):
                self._facts.pop(step, None)
        return remaining

    def _delete(self, step: int) -> OSError | None:
        """Deletes a step's record; one that cannot be deleted stays a step, for the policy's next
        turn.

        It is gone once a listing shows its packs alone, or nothing, where a sweep was faster: a
        client of a shared file system may not find, and so not delete, what is there.
        """
        folder = self.folder(step)
        record = f"{folder}/{RECORD_NAME}"
        release = hold(self._storage, record)
        try:
            names = self._file_names(folder)
            self._storage.delete([record])
            if not self._is_without(folder, record):
                raise OSError(errno.EIO, "its record does not go", record)
        except OSError as error:
            _log.warning(
                "step %d could not be deleted, it is tried again after the next save: %s",
                step,
                error,
            )
            release()
            return error
        self._worker.put(f"closing the record of step {step}", release)
        self._worker.put(f"deleting step {step}", lambda: self._delete_files(folder, names()))
        return None

    def _is_without(self, folder: str, record: str) -> bool:
        """Says whether the record is gone. An empty folder is looked at again: a sweep may be at
        it, or a store not show all.
        """
        for _ in range(LOOKS):
            if left := [entry.name for entry in self._storage.list(folder)]:
                return record not in left
            if f"{folder}/" not in [entry.name for entry in self._storage.list("")]:
                break
        return True

    def _file_names(self, folder: str) -> Callable[[], list[str]]:
        """Returns what reads the names of a step's files from its record, later; where it is
        damaged, all that look like ours now.
        """
        with contextlib.suppress(CheckpointError):
            data = fetch_record(self._storage, folder)
            if is_sealed(data):
                return lambda: parse_record(data, join(self._storage.root, folder)).file_names()
        found = pack_names(self._storage, folder)
        return lambda: found

    def _delete_files(self, folder: str, names: Sequence[str]) -> None:
        began = time.perf_counter()
        delete_files(self._storage, folder, names)
        self._statistics.add(steps_deleted=1, delete_s=time.perf_counter() - began)

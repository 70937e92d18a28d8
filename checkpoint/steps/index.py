"""Knows the steps of a root, and which of them the keep policy lets go."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from crc32c import crc32c

from ..errors import CheckpointError
from ..format.record import read_record
from ..options import Statistics
from ..policy import KeepAll, KeepPolicy, StepFacts, to_delete
from ..storage.base import Storage
from ..storage.tombstone import RECORD_NAME
from .garbage import BackgroundWorker, delete_files, pack_names
from .holds import held_steps

_log = logging.getLogger(__name__)


class StepIndex:
    """The known steps of a root, alike on every process of a group; the primary's deletes them. Thread-safe."""

    def __init__(
        self,
        storage: Storage,
        keep_policy: KeepPolicy,
        steps: Iterable[int],
        worker: BackgroundWorker,
        statistics: Statistics,
        *,
        deletes: bool,
    ) -> None:
        self._storage = storage
        self._keep_policy = keep_policy
        self._worker = worker
        self._statistics = statistics
        self._deletes = deletes
        self._facts: dict[int, StepFacts | None] = dict.fromkeys(steps)  # None: the record was not read yet
        self._lock = threading.Lock()

    def __contains__(self, step: int) -> bool:
        with self._lock:
            return step in self._facts

    def steps(self) -> list[int]:
        """Returns the known steps, ascending."""
        with self._lock:
            return sorted(self._facts)

    def add(self, committed: StepFacts) -> None:
        """Adds a committed step."""
        with self._lock:
            self._facts[committed.step] = committed

    def crc(self) -> int:
        """Returns the CRC of the known steps: processes whose CRCs are equal know the same."""
        return crc32c(",".join(map(str, self.steps())).encode())

    def adopt(self, steps: Iterable[int]) -> None:
        """Knows these steps from now on, and no others: the primary's list."""
        with self._lock:
            self._facts = {step: self._facts.get(step) for step in steps}

    def superfluous(self, new: StepFacts) -> list[int]:
        """Returns the steps that the keep policy lets go once `new` is committed, which stays. Reads the store: for the primary."""
        if isinstance(self._keep_policy, KeepAll):
            return []
        with self._lock:
            after = self._facts | {new.step: new}
        known = [facts for step in after if (facts := after[step] or self._read(step)) is not None]
        return to_delete(self._keep_policy, known, held=held_steps(self._storage) | {new.step})

    def _read(self, step: int) -> StepFacts | None:
        """Reads what the keep policy needs; None for a step whose record is damaged: it is never touched."""
        try:
            found = StepFacts(step, dict(read_record(self._storage, str(step)).metrics))
        except (CheckpointError, OSError):
            return None
        self.add(found)
        return found

    def remove(self, steps: Sequence[int]) -> list[int]:
        """Forgets steps; the primary deletes their records now, and their packs in the background. Returns what could not be deleted."""
        remaining = [step for step in steps if self._deletes and not self._delete(step)]
        with self._lock:
            for step in set(steps) - set(remaining):
                self._facts.pop(step, None)
        return remaining

    def _delete(self, step: int) -> bool:
        """Deletes a step's record, and says whether it is gone; one that cannot be deleted stays a step, for the policy's next turn."""
        try:
            names = self._file_names(step)
            self._storage.delete([f"{step}/{RECORD_NAME}"])
        except OSError as error:
            _log.warning("step %d could not be deleted, it is tried again after the next save: %s", step, error)
            return False
        self._worker.put(f"deleting step {step}", lambda: self._delete_files(step, names))
        return True

    def _file_names(self, step: int) -> list[str]:
        """Returns the files of a step, by its record; where that does not read, all that look like ours."""
        with contextlib.suppress(CheckpointError):
            return read_record(self._storage, str(step)).file_names()
        return pack_names(self._storage, step)

    def _delete_files(self, step: int, names: Sequence[str]) -> None:
        began = time.perf_counter()
        delete_files(self._storage, str(step), names)
        self._statistics.add(steps_deleted=1, delete_s=time.perf_counter() - began)

"""Knows the steps of a root, and which of them the keep policy lets go."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from crc32c import crc32c

from ..errors import CheckpointError
from ..format.record import Record, read_record
from ..format.step_folders import PLAIN_NAMES, StepNames, has_record, read_step_names
from ..policy import (
    KeepAll,
    KeepPolicy,
    StepFacts,
    best_by_metric,
    to_delete,
    unknown_metrics,
)
from ..storage.base import Storage
from ..storage.retries import until
from ..storage.threads import run_side_by_side
from .claims import writer_of
from .step_files import StepDeleter

_log = logging.getLogger(__name__)
_MOST_METRICS = 8  # of one step, for those who watch


@dataclass(frozen=True)
class StepInfo:
    """What is known of a step, and of how it was saved; it has no `facts` before its record was
    read. `incremental`: what had not changed was linked.
    """

    facts: StepFacts | None = None
    nbytes: int = 0
    incremental: bool = False
    saved_unix_s: float = 0.0
    took_s: float = 0.0

    @classmethod
    def of(cls, step: int, record: Record) -> Self:
        """Takes what a record says."""
        return cls(
            facts_of(step, record),
            sum(leaf.nbytes for item in record.items.values() for leaf in item.leaves),
            saved_unix_s=record.finished_s,
            took_s=record.finished_s - record.started_s,
        )

    def as_fields(self) -> dict[str, Any]:
        """Returns the fields of CheckpointStep; of the metrics the first that are finite."""
        metrics = {} if self.facts is None else self.facts.metrics
        finite = [(name, value) for name, value in metrics.items() if math.isfinite(value)]
        return {
            "bytes": self.nbytes,
            "incremental": self.incremental,
            "saved_unix_s": self.saved_unix_s,
            "took_s": self.took_s,
            "metrics": dict(finite[:_MOST_METRICS]),
        }


class StepIndex:
    """The known steps of a root, alike on every process of a group. Thread-safe.

    Those that were left behind may be steps of other libraries too. With a `deleter` (at the
    primary) it deletes steps too. A process that `is_alone` shares its knowledge with no other
    process, and may look at the store instead. `names` is None for a reader who came before anybody
    has said how the root calls its steps.
    """

    def __init__(
        self,
        storage: Storage,
        keep_policy: KeepPolicy,
        steps: Iterable[int],
        deleter: StepDeleter | None = None,
        *,
        left_behind: Iterable[int] = (),
        is_alone: bool = False,
        names: StepNames | None = PLAIN_NAMES,
    ) -> None:
        self._storage = storage
        self._keep_policy = keep_policy
        self._deleter = deleter
        self._is_alone = is_alone
        self._names = names
        self._steps = dict.fromkeys(steps, StepInfo())
        self._marked = set[int]()
        self._left_behind = set(left_behind)
        self._passed_over = set[int]()
        self._has_warned = False
        self._lock = threading.Lock()

    def __contains__(self, step: int) -> bool:
        with self._lock:
            return step in self._steps

    def exists(self, step: int, *, end_s: float = math.inf) -> bool:
        """Says whether a step is there, by what all processes know.

        A process alone looks at the store, until `end_s` by the monotonic clock, and raises the
        store's OSError.
        """
        if self._is_alone:
            return has_record(until(self._storage, end_s), self.folder(step))
        return step in self

    @property
    def names(self) -> StepNames:
        """How the root calls its steps."""
        return self._names or read_step_names(self._storage)

    def folder(self, step: int) -> str:
        """Returns the name of a step's folder."""
        return self.names.name_of(step)

    def steps(self) -> list[int]:
        """Returns the known steps, ascending."""
        return sorted(self.known())

    def known(self) -> dict[int, StepInfo]:
        """Returns the known steps, and what is known of each."""
        with self._lock:
            return dict(self._steps)

    def left_behind(self) -> set[int]:
        """Returns the steps that were left behind."""
        with self._lock:
            return set(self._left_behind)

    def note_marked(self, steps: Iterable[int]) -> None:
        """Notes steps that the primary has marked as left, for `leave_marked`."""
        with self._lock:
            self._marked.update(steps)

    def leave_marked(self, also: Iterable[int] = ()) -> bool:
        """Knows what was marked as left behind, and some `also`, once the save that leaves it is
        there; says whether that is news. Until then, and where that fails until the next save, all
        know the same.
        """
        with self._lock:
            left = self._left_behind.union(self._marked, also)
            is_news = left != self._left_behind
            self._left_behind = left
            self._marked = set()
            return is_news

    def add(self, step: int, committed: StepInfo) -> None:
        """Adds a committed step."""
        with self._lock:
            self._steps[step] = committed
            self._passed_over.discard(step)
            self._left_behind.discard(step)

    def learn(self, step: int) -> None:
        """Knows a step that a commit has found: one of another writer, or of an own save whose
        outcome was not known.
        """
        with self._lock:
            self._steps.setdefault(step, StepInfo())

    def pass_over(self, step: int) -> None:
        """Notes that an older step was restored instead of this one: it may be saved again."""
        with self._lock:
            self._passed_over.add(step)

    def passed_over(self) -> set[int]:
        """Returns the steps that were passed over and not saved since: a save may replace them."""
        with self._lock:
            return set(self._passed_over)

    def best_by_metric(self) -> dict[str, int]:
        """Returns the best step by each metric that the keep policy judges by."""
        left = self.left_behind()
        infos = [info for step, info in self.known().items() if step not in left]
        return best_by_metric(self._keep_policy, [info.facts for info in infos if info.facts])

    def crc(self) -> int:
        """Returns the CRC of the known steps: processes whose CRCs are equal know the same."""
        return crc32c(f"{self.steps()} {sorted(self.left_behind())}".encode())

    def adopt(self, steps: Iterable[int]) -> None:
        """Knows these steps from now on, and no others: the primary's list."""
        with self._lock:
            self._steps = {step: self._steps.get(step, StepInfo()) for step in steps}

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
        left = self.left_behind() - {new.step}
        known = self._facts_with(new, until(self._storage, end_s))
        self._warn_of_metrics(known)
        going = to_delete(self._keep_policy, known, left_behind=left)
        return [step for step in going if step != new.step]

    def _facts_with(self, new: StepFacts, storage: Storage) -> list[StepFacts]:
        """Returns the facts of all steps that have some; reads those that are not known yet."""
        after = self.known() | {new.step: StepInfo(new)}
        unread = [step for step, info in after.items() if info.facts is None]
        read = run_side_by_side(
            lambda step: self._read(storage, step), unread, storage.max_concurrency
        )
        return [info.facts for info in [*after.values(), *read] if info.facts is not None]

    def _warn_of_metrics(self, known: Sequence[StepFacts]) -> None:
        """Warns, once, of metrics that the keep policy asks for and no step has."""
        if self._has_warned:
            return
        for sentence in unknown_metrics(self._keep_policy, known):
            _log.warning("%s: %s", self._storage.root, sentence)
            self._has_warned = True

    def _read(self, storage: Storage, step: int) -> StepInfo:
        """Reads what the keep policy needs; where the record is damaged its step always stays."""
        try:
            info = StepInfo.of(step, read_record(storage, self.folder(step)))
        except (CheckpointError, OSError):
            return StepInfo()
        with self._lock:
            if step in self._steps:  # else it was deleted meanwhile
                self._steps[step] = info
        return info

    def remove(self, steps: Iterable[int], *, end_s: float = math.inf) -> dict[int, OSError]:
        """Forgets steps; returns those that remain, and why.

        The primary deletes their records now, until `end_s` by the monotonic clock, and their packs
        in the background.
        """
        remaining = {}
        for step in steps:
            error = None
            if self._deleter is not None:
                error = self._deleter.delete(step, self.folder(step), end_s)
            if error is not None:
                remaining[step] = error
                continue
            with self._lock:
                self._steps.pop(step, None)
                self._left_behind.discard(step)
        return remaining


def facts_of(step: int, record: Record) -> StepFacts:
    """Returns what keep policies decide by, of a step with this record."""
    return StepFacts(step, dict(record.metrics), record.started_s, writer_of(record.writer_id))

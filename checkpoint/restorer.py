"""Restoring through a manager: which step, agreed by all, and what kind of item."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import jax

from holdfast.multihost import Group

from .errors import CheckpointError, StepNotFound, TreeMismatch, describe
from .format.files import list_steps
from .format.json_state import give_state, is_iterator
from .format.record import Record, read_record
from .layouts.detect import ForeignSteps, restore_checkpoint
from .options import Statistics
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions, read_json, restore_item
from .steps.holds import add_hold
from .storage.base import Storage


class Restorer:
    """Restores items for a manager. For one thread at a time."""

    def __init__(
        self,
        storage: Storage,
        group: Group,
        channel: str,
        statistics: Statistics,
        timeout_s: float,
        foreign: ForeignSteps | None = None,
    ) -> None:
        self._storage = storage
        self._group = group
        self._channel = f"checkpoint/{channel}"
        self._statistics = statistics
        self._timeout_s = timeout_s
        self._foreign = foreign or ForeignSteps(storage, {})

    def restore(self, step: int | None, like: Any, item: str, how: RestoreOptions, *, fallback: bool = False, hold_s: float = 0.0) -> Any:
        """Restores an item; see CheckpointManager.restore."""
        began = time.perf_counter()
        if fallback:
            value = self._newest_whole(step, like, item, how, hold_s)
        else:
            value = self._one(self._newest() if step is None else step, like, item, how, hold_s)
        size = sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree_util.tree_leaves(value))
        self._statistics.add(restores=1, restore_s=time.perf_counter() - began, restore_bytes=size)
        return value

    def _one(self, step: int, like: Any, item: str, how: RestoreOptions, hold_s: float) -> Any:
        if hold_s > 0 and self._group.index == 0:
            add_hold(self._storage, step, hold_s)
        if step in self._foreign:
            return restore_checkpoint(self._foreign.open(step), item, like, how)
        record = read_record(self._storage, str(step))
        if is_iterator(like):
            return give_state(like, read_json(self._storage, str(step), record, item, _state_of(record, item, how.per_process)))
        if item in record.items and record.items[item].kind == "json":
            chosen = how.per_process.process if how.per_process is not None and how.per_process.processes is None else 0
            return read_json(self._storage, str(step), record, item, chosen)
        return restore_item(self._storage, str(step), record, item, like, how)

    def _steps(self) -> list[int]:
        """Returns the primary's listing, on every process."""
        listing = json.dumps([*list_steps(self._storage), *self._foreign]).encode() if self._group.index == 0 else None
        return [int(step) for step in json.loads(self._group.broadcast(f"{self._channel}/steps", listing, timeout_s=self._timeout_s))]

    def _newest(self) -> int:
        steps = self._steps()
        if not steps:
            raise StepNotFound(f"there is no step in {self._storage.root}", path=self._storage.root)
        return max(steps)

    def _newest_whole(self, step: int | None, like: Any, item: str, how: RestoreOptions, hold_s: float) -> Any:
        """Tries the steps from the newest (or `step`) down until one restores on every process."""
        failures = []
        candidates = [found for found in sorted(self._steps(), reverse=True) if step is None or found <= step]
        for candidate, number in zip(candidates, itertools.count()):
            value, trouble = None, ""
            try:
                value = self._one(candidate, like, item, how, hold_s)
            except (CheckpointError, OSError) as error:
                trouble = describe(error)
            trouble = self._agreed(f"{self._channel}/whole/{number % 8}", trouble)
            if not trouble:
                return value
            failures.append(f"step {candidate}: {trouble}")
        raise StepNotFound(f"no step of {self._storage.root} restores: {'; '.join(failures) or 'there is none'}", path=self._storage.root)

    def _agreed(self, name: str, trouble: str) -> str:
        """Returns the first process's trouble, alike on every process; "" when none has any."""
        gathered = self._group.gather(f"{name}/trouble", trouble.encode(), timeout_s=self._timeout_s)
        first = None
        if gathered is not None:
            first = next((f"process {rank}: {text.decode()}" for rank, text in enumerate(gathered) if text), "").encode()
        return self._group.broadcast(f"{name}/verdict", first, timeout_s=self._timeout_s).decode()


def _state_of(record: Record, item: str, own: PerProcessSelection | None) -> int:
    """Returns whose state an iterator takes; raises TreeMismatch on another number of processes than saved, unless one is chosen."""
    if own is None or own.processes in (None, record.processes):
        return 0 if own is None else own.process
    message = (
        f"{record.path}: the item {item!r} has a state for each of {record.processes} processes, and this job has {own.processes}; to take "
        f"that of one of them, pass process=0 to {record.processes - 1}"
    )
    raise TreeMismatch(message, leaf=item, expected=f"states of {own.processes} processes", found=f"states of {record.processes}")

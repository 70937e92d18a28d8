"""What a save does in the caller's thread: items are told apart, trees planned and snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.multihost import Group

from ..format.json_state import Json, is_iterator, state_of
from ..options import Options, Progress
from ..storage.base import Storage
from .commit import SaveRequest
from .planner import Planner
from .snapshot import take_snapshot

PROGRESS_S = 0.25  # at most four calls of Options.progress a second


class SaveStager:
    """Plans and snapshots items; keeps a planner for each. For one thread at a time."""

    def __init__(self, storage: Storage, group: Group, options: Options) -> None:
        self._storage = storage
        self._group = group
        self._options = options
        self._planners: dict[str, Planner] = {}

    def fill(self, save: SaveRequest, items: Mapping[str, Any], metrics: Mapping[str, Any] | None, metadata: Any) -> None:
        """Puts items, metrics and metadata into a save; what it has taken before an error is the caller's to release."""
        save.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        save.metadata = metadata
        for name, value in items.items():
            if isinstance(value, Json):
                save.values[name] = value.value
            elif is_iterator(value):
                save.values[name] = state_of(name, value)
            else:
                plan = self._planner(name).plan(value)
                save.trees[name] = (plan, take_snapshot(plan, value, host_memory_bytes=self._options.host_memory_bytes))

    def _planner(self, item: str) -> Planner:
        if item not in self._planners:
            self._planners[item] = Planner(
                self._group.index,
                self._group.count,
                processes=getattr(self._group, "processes", None),
                max_file_bytes=self._storage.max_file_bytes,
                per_process=self._options.per_process,
            )
        return self._planners[item]

    def meter(self, save: SaveRequest) -> Callable[[int], None] | None:
        """Returns what counts a save's bytes for Options.progress; None when nobody listens."""
        report, total = self._options.progress, save.own_bytes
        if report is None:
            return None
        lock, done, last = threading.Lock(), 0, 0.0

        def count(size: int) -> None:
            nonlocal done, last
            with lock:
                done += size
                now = time.monotonic()
                due = now - last >= PROGRESS_S or done >= total
                last = now if due else last
                seen = done
            if due:
                report(Progress(save.step, "save", seen, total))

        return count

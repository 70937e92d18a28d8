"""A coordinator in memory, for jobs whose processes are threads of a test: ClusterGroup works over
its clients as over any.

tests/multihost/group/test_group.py holds it to what real clients of a real service do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.coordination import BarrierTimeout, CoordinationError


@dataclass
class _Barrier:
    """One use of a barrier's name: who has come, and how it ended for all."""

    came: set[int] = field(default_factory=set)
    missing: tuple[int, ...] = ()  # of one that failed


@dataclass
class MemoryCoordinator:
    """The keys and barriers of a job of `count` processes; `changed` guards all of it."""

    count: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    values: dict[str, bytes] = field(default_factory=dict)
    barriers: dict[tuple[str, int], _Barrier] = field(default_factory=dict)
    closed: bool = False

    def close(self) -> None:
        """Ends the calls that wait, as the shutdown of a client does."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def wait(self, happened: Callable[[], object], timeout_in_ms: int) -> bool:
        """Waits with `changed` held; returns whether it has happened in time."""
        in_time = self.changed.wait_for(lambda: self.closed or happened(), timeout_in_ms / 1e3)
        if self.closed:
            raise CoordinationError("the client was shut down", code="CANCELLED")
        return in_time


class MemoryClient:
    """One process's client, with jaxlib's method names: it does not hear of other processes."""

    def __init__(self, coordinator: MemoryCoordinator, process: int) -> None:
        self._coordinator = coordinator
        self._process = process
        self._uses: dict[str, int] = {}

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None
    ) -> None:
        """Waits until all have come; one whose time is over fails it for all, late ones too."""
        coordinator = self._coordinator
        members = set(range(coordinator.count) if process_ids is None else process_ids)
        with coordinator.changed:
            use = self._uses[barrier_id] = self._uses.get(barrier_id, -1) + 1
            barrier = coordinator.barriers.setdefault((barrier_id, use), _Barrier())
            barrier.came.add(self._process)
            coordinator.changed.notify_all()
            coordinator.wait(lambda: barrier.missing or barrier.came >= members, timeout_in_ms)
            if not barrier.missing and not barrier.came >= members:
                barrier.missing = tuple(sorted(members - barrier.came))
                coordinator.changed.notify_all()
            if barrier.missing:
                raise BarrierTimeout(
                    f"Barrier timed out. Id: {barrier_id}::{use}. missing {barrier.missing}",
                    missing=barrier.missing,
                )

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._coordinator.changed:
            if key in self._coordinator.values and not allow_overwrite:
                raise CoordinationError(f"{key!r} exists", code="ALREADY_EXISTS")
            self._coordinator.values[key] = value
            self._coordinator.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._coordinator.changed:
            if not self._coordinator.wait(lambda: key in self._coordinator.values, timeout_in_ms):
                raise CoordinationError(f"{key!r} was not set", code="DEADLINE_EXCEEDED")
            return self._coordinator.values[key]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        with self._coordinator.changed:
            values = self._coordinator.values
            return [(each, values[each]) for each in values if each.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._coordinator.changed:
            values = self._coordinator.values
            for each in [each for each in values if f"{each}/".startswith(f"{key}/")]:
                del values[each]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._coordinator.changed:
            number = int(self._coordinator.values.get(key, b"0")) + increment
            self._coordinator.values[key] = b"%d" % number
            return number

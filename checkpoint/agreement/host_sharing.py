"""Which processes of a group share a machine, and a cgroup: each says once where it is."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from holdfast.coordination.mounts import boot_id
from holdfast.multihost import Group
from holdfast.multihost.group.runtime import current_spec

from ..memory.budget import Sharers, note_sharers
from ..memory.host import cgroup_numbers
from .exchange import exchange
from .messages import Message


@dataclass(frozen=True)
class HostPlace(Message):
    """Where a process is: its machine, its cgroup there and those above, by their numbers."""

    machine: str
    cgroups: tuple[int, ...]


@dataclass(frozen=True)
class SharerCounts(Message):
    """By rank, how many processes share its machine, then each of its cgroups."""

    by_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, places: Sequence[HostPlace]) -> Self:
        """Counts. Pure."""
        counts = collections.Counter(
            (place.machine, level) for place in places for level in (None, *place.cgroups)
        )
        return cls(
            tuple(
                tuple(counts[place.machine, level] for level in (None, *place.cgroups))
                for place in places
            )
        )


def launched_sharers() -> Sharers | None:
    """Returns with whom this process shares its machine, as its launcher says; else None."""
    spec = current_spec()
    return None if spec is None or spec.local_count is None else Sharers(spec.local_count)


def find_sharers(group: Group, name: str, timeout_s: float, *, asks: bool) -> Sharers:
    """Returns with whom this process shares what bounds its memory.

    With `asks`, which is alike on all processes, all tell each other where they are. Without it the
    launcher has said so. Blocks. Raises BarrierTimeout, ProcessLost.
    """
    sharers = launched_sharers() or Sharers(group.count)
    if asks and group.count > 1:
        sharers = _ask_where_all_are(group, name, timeout_s)
    note_sharers(sharers)
    return sharers


def _ask_where_all_are(group: Group, name: str, timeout_s: float) -> Sharers:
    numbers = cgroup_numbers()
    place = HostPlace(boot_id(), tuple(numbers.values()))
    counts = exchange(group, name, place, SharerCounts.of, SharerCounts, timeout_s=timeout_s)
    on_machine, *in_cgroups = counts.by_rank[group.index]
    return Sharers(
        on_machine,
        dict(zip(numbers, in_cgroups, strict=True)),
        is_whole_job=all(found == group.count for row in counts.by_rank for found in row),
    )

"""What a restore needs of the host's memory, and whether all that share it have room. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ..errors import NotEnoughMemory


@dataclass(frozen=True)
class SeenLevel:
    """A level as one process sees it; `key` tells it from others, whoever sees it."""

    key: str
    name: str
    limit_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that a process needs at a time to restore an item, the leaf that needs the most,
    and the levels of its memory.

    `stays`: they are those of all values, which stay in the host's memory. `item_bytes` are the
    item's as it is stored, alike on all processes.
    """

    nbytes: int
    item: str = ""
    item_bytes: int = 0
    leaf: str = ""
    leaf_bytes: int = 0
    stays: bool = False
    levels: tuple[SeenLevel, ...] = ()

    @property
    def text(self) -> str:
        """What is needed, and what for."""
        if not self.stays:
            return f"{shown_size(self.nbytes)} at a time for {self.leaf!r}"
        of_leaf = f"{shown_size(self.leaf_bytes)} of them for {self.leaf!r}"
        return f"{shown_size(self.nbytes)} for its values, {of_leaf}"


class Shortage(NamedTuple):
    """The process that needs the most of a level that has too little, and what a restore raises."""

    process: int
    error: NotEnoughMemory


def find_shortage(of_all: Sequence[MemoryNeed]) -> Shortage | None:
    """Returns the first level that has less left than the processes which share it need together.

    Each has looked at it before any of them takes memory: the most that one has seen counts.
    """
    shared: dict[str, list[tuple[int, SeenLevel]]] = {}
    for process, need in enumerate(of_all):
        for level in need.levels:
            shared.setdefault(level.key, []).append((process, level))
    for seen in shared.values():
        level = max((level for _, level in seen), key=attrgetter("most_bytes"))
        total = sum(of_all[process].nbytes for process, _ in seen)
        if total > level.most_bytes:
            most = max((process for process, _ in seen), key=lambda each: of_all[each].nbytes)
            return Shortage(most, _error(of_all[most], level, len(seen), total))
    return None


def _error(need: MemoryNeed, level: SeenLevel, sharers: int, total_bytes: int) -> NotEnoughMemory:
    shared = ""
    if sharers > 1:
        shared = f", which {sharers} processes share that need {shown_size(total_bytes)} together"
    missing = shown_size(total_bytes - level.most_bytes)
    return NotEnoughMemory(
        f"this restore needs {need.text}; {shown_size(level.most_bytes)} are left in"
        f" {level.name}{shared}; raise its limit of {shown_size(level.limit_bytes)} by"
        f" {missing}, drop arrays that are held besides, or restore on more machines",
        leaf=need.leaf,
        needed_bytes=total_bytes,
        free_bytes=level.most_bytes,
    )


def shown_size(nbytes: int) -> str:
    """Returns a size as limits of memory are written, such as "1.2 GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"

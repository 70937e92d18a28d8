"""Divides a restore into waves that fit into what the host's memory has left. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from ..format.record import ItemRecord
from ..memory.budget import FreeMemory, MemoryBudget
from ..memory.need import MemoryNeed
from .devices import DevicePlacement
from .match import LeafRequest

WAVE_BYTES = 2 << 30  # of host memory for bytes on their way to devices with memory of their own
LEAST_BYTES = 64 << 20  # a chunk passes always


class Placed(NamedTuple):
    """A request, and where it goes (None: it is one array on the host).

    This process reads `nbytes` of it; its value takes `value_bytes` here.
    """

    request: LeafRequest
    placement: DevicePlacement | None
    nbytes: int
    value_bytes: int

    @classmethod
    def of(cls, request: LeafRequest, placement: DevicePlacement | None) -> Self:
        """Counts the bytes."""
        leaf = request.leaf
        if leaf.grid is None:
            return cls(request, placement, 0, 0)
        elements = math.prod(leaf.shape)
        if placement is not None:
            elements = placement.num_elements
        dtype = leaf.numpy_dtype
        value_bytes = elements * (request.dtype or dtype).itemsize
        return cls(request, placement, elements * dtype.itemsize, value_bytes)

    @property
    def wave_bytes(self) -> int:
        """What it takes of the host's memory in its wave: a cast makes a copy."""
        return self.nbytes if self.request.dtype is None else self.nbytes + self.value_bytes


@dataclass(frozen=True)
class WaveRoom:
    """The room that a host's memory has for the waves of one item, which take `total_bytes`.

    `stays`: the values stay in it. This process may hold `held_for_others` besides.
    """

    item: ItemRecord
    memory: MemoryBudget
    total_bytes: int
    stays: bool
    held_for_others: int

    def need_of(self, placed: Sequence[Placed]) -> MemoryNeed:
        """Returns what is needed for these: room for all values if they stay, else the largest."""
        levels = self.memory.seen_levels(self.total_bytes)
        if not placed:
            return MemoryNeed(0, self.item.name, levels=levels)
        largest = max(placed, key=lambda each: each.wave_bytes)
        leaf_bytes = largest.value_bytes if self.stays else largest.wave_bytes
        return MemoryNeed(
            sum(each.value_bytes for each in placed) if self.stays else leaf_bytes,
            self.item.name,
            sum(leaf.nbytes for leaf in self.item.leaves),
            largest.request.leaf.path,
            leaf_bytes=leaf_bytes,
            stays=self.stays,
            levels=levels,
        )

    def limit_bytes(self, before_bytes: int) -> int:
        """Returns how much a wave may have now: see `wave_limit_bytes`."""
        free = self.memory.free_for(self.total_bytes)
        free = replace(free, nbytes=max(0, free.nbytes - self.held_for_others))
        return wave_limit_bytes(free, before_bytes, stays=self.stays)


def divide_into_waves(
    placed: Sequence[Placed], limit_bytes: Callable[[], int]
) -> Iterator[list[Placed]]:
    """Yields the requests in turns of at most so many bytes, asked before each wave.

    A request that has more comes alone.
    """
    wave: list[Placed] = []
    held = 0
    limit = limit_bytes()
    for each in placed:
        if wave and held + each.wave_bytes > limit:
            yield wave
            wave = []
            held = 0
            limit = limit_bytes()
        wave.append(each)
        held += each.wave_bytes
    yield wave


def wave_limit_bytes(free: FreeMemory, before_bytes: int, *, stays: bool) -> int:
    """Returns how much a wave may have, while the wave before it still holds `before_bytes`.

    Where the values stay in the host's memory, there is one wave if they fit.
    """
    if stays:
        return max(free.nbytes, LEAST_BYTES)
    both_bytes = min(free.nbytes + before_bytes, WAVE_BYTES)
    limit = min(free.nbytes, both_bytes // 2)
    return limit if free.level is None else max(limit, LEAST_BYTES)

"""The grid of a leaf: how an array is cut into shards and those into chunks, and what a chunk is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """Cuts an array: along axis i into parts of `part[i]`, each of them into pieces of `sub[i]` (the last of a part may be shorter)."""

    shape: tuple[int, ...]
    part: tuple[int, ...]
    sub: tuple[int, ...]
    itemsize: int = 0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(size // part * -(-part // sub) if size else 1 for size, part, sub in zip(self.shape, self.part, self.sub, strict=True))

    @property
    def cells(self) -> int:
        return math.prod(self.counts)

    def starts(self, axis: int) -> Ints:
        """Returns where the pieces along an axis begin, and as the last element where the axis ends."""
        size, part, sub = self.shape[axis], self.part[axis], self.sub[axis]
        if not size:
            return np.zeros(2, np.int64)
        inner = np.arange(0, part, sub, dtype=np.int64)
        return np.append((np.arange(0, size, part, dtype=np.int64)[:, None] + inner).reshape(-1), size)

    def region(self, cell: int) -> tuple[tuple[int, int], ...]:
        """Returns the (start, stop) of a cell along each axis."""
        bounds = []
        for axis in range(len(self.shape) - 1, -1, -1):
            cell, index = divmod(cell, self.counts[axis])
            size, part, sub = self.shape[axis], self.part[axis], self.sub[axis]
            if not size:
                bounds.append((0, 0))
                continue
            outer, inner = divmod(index, -(-part // sub))
            start = outer * part + inner * sub
            bounds.append((start, min(start + sub, (outer + 1) * part)))
        return tuple(reversed(bounds))

    @cached_property
    def sizes(self) -> Ints:
        """Is the bytes of every cell, in C order."""
        total = np.full(1, self.itemsize, np.int64)
        for axis in range(len(self.shape)):
            total = (total[:, None] * np.diff(self.starts(axis))).reshape(-1)
        return total

    @cached_property
    def shards(self) -> Ints:
        """Is, for every cell in C order, the index of the part (the shard) that it lies in."""
        cells = np.arange(self.cells)
        shards = np.zeros_like(cells)
        indices = np.unravel_index(cells, self.counts) if self.counts else ()
        for index, size, part, sub in zip(indices, self.shape, self.part, self.sub, strict=True):
            shards = shards * (size // part if size else 1) + (index // -(-part // sub) if size else 0)
        return shards


@dataclass(frozen=True)
class Chunk:
    """One chunk that this rank writes: which leaf, which of its addressable shards (-1: the host's whole array), and where in it."""

    leaf: int
    slot: int
    inside: tuple[slice, ...] | None  # None: the whole shard
    name: str
    shape: tuple[int, ...]
    nbytes: int
    itemsize: int


def chunk_name(path: str, region: Sequence[tuple[int, int]], shape: Sequence[int]) -> str:
    """Returns the tensor name of a chunk: the leaf's path, with the slice where it is not the whole array."""
    if all(stop - start == size for (start, stop), size in zip(region, shape, strict=True)):
        return path
    return f"{path}[{','.join(f'{start}:{stop}' for start, stop in region)}]"

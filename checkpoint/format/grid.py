"""The grid of a leaf: how an array is cut into shards and chunks, and how a chunk is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Cuts an array into shards of `shard_shape`, and those into chunks of `chunk_shape`.

    The last chunk of a shard may be shorter.
    """

    shape: Shape
    shard_shape: Shape
    chunk_shape: Shape
    itemsize: int = 0

    @cached_property
    def counts(self) -> Shape:
        """How many chunks there are along each axis."""
        cuts = zip(self.shape, self.shard_shape, self.chunk_shape, strict=True)
        return tuple(
            size // shard * -(-shard // chunk) if size else 1 for size, shard, chunk in cuts
        )

    @property
    def num_chunks(self) -> int:
        return math.prod(self.counts)

    def starts(self, axis: int) -> Ints:
        """Returns where the chunks along an axis begin, and then where the axis ends."""
        size = self.shape[axis]
        shard = self.shard_shape[axis]
        chunk = self.chunk_shape[axis]
        if not size:
            return np.zeros(2, np.int64)
        outer = np.arange(0, size, shard, dtype=np.int64)
        inner = np.arange(0, shard, chunk, dtype=np.int64)
        return np.append(np.add.outer(outer, inner).reshape(-1), size)

    def region(self, index: int) -> tuple[tuple[int, int], ...]:
        """Returns the (start, stop) of a chunk along each axis."""
        bounds = []
        cuts = zip(self.shape, self.shard_shape, self.chunk_shape, self.counts, strict=True)
        for size, shard, chunk, count in reversed([*cuts]):
            index, along = divmod(index, count)
            if not size:
                bounds.append((0, 0))
                continue
            outer, inner = divmod(along, -(-shard // chunk))
            start = outer * shard + inner * chunk
            bounds.append((start, min(start + chunk, (outer + 1) * shard)))
        return tuple(reversed(bounds))

    @cached_property
    def sizes(self) -> Ints:
        """The bytes of every chunk, in C order."""
        total = np.full(1, self.itemsize, np.int64)
        for axis in range(len(self.shape)):
            total = (total[:, None] * np.diff(self.starts(axis))).reshape(-1)
        return total

    @cached_property
    def shards(self) -> Ints:
        """The index, for every chunk in C order, of the shard that it lies in."""
        chunks = np.arange(self.num_chunks)
        shards = np.zeros_like(chunks)
        indices = np.unravel_index(chunks, self.counts) if self.counts else ()
        for index, size, shard, chunk in zip(
            indices, self.shape, self.shard_shape, self.chunk_shape, strict=True
        ):
            if size:  # an empty axis has one shard
                shards = shards * (size // shard) + index // -(-shard // chunk)
        return shards


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that this process writes.

    `slot` is the addressable shard of its leaf that it is in (-1: the host's whole array), and
    `inside` where it is in that shard (None: all of it).
    """

    leaf: int
    slot: int
    inside: tuple[slice, ...] | None
    name: str
    shape: Shape
    nbytes: int
    itemsize: int


def chunk_name(path: str, region: Sequence[tuple[int, int]], shape: Sequence[int]) -> str:
    """Returns the tensor name of a chunk: its leaf's path, and its slice if it is a part."""
    if all(stop - start == size for (start, stop), size in zip(region, shape, strict=True)):
        return path
    return f"{path}[{','.join(f'{start}:{stop}' for start, stop in region)}]"

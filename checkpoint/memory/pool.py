"""Memory for what is read, and for copies: 64-aligned, and used again when the arrays in it have
died.

On a virtual machine a fresh page can cost more than the bytes that are read into it. Blocks that
come back are marked as free to take (MADV_FREE): the kernel takes them when it needs memory, and
until then they are warm. It still calls them free when they are in use again: see `reused_bytes`.
"""

from __future__ import annotations

import atexit
import collections
import mmap
from typing import Any

import numpy as np

ALIGN_BYTES = 64
POOLED_BYTES = 1 << 20  # smaller requests go to numpy
IDLE_BYTES = 4 << 30  # more than this is given back to the system at once
_HUGE_BYTES = 2 << 20


class _Block:
    """Owns one mapping for as long as any array uses it.

    numpy and jax keep the block alive, and its death returns the mapping.
    """

    def __init__(self, pool: MemoryPool, mapping: mmap.mmap) -> None:
        self._pool = pool
        self._mapping = mapping
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (len(mapping),),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._pool.give_back(self._mapping)


class MemoryPool:
    """Hands out memory and takes it back. Thread-safe without a lock, for finalizers use it too."""

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self._idle_bytes = idle_bytes
        self._free: dict[int, collections.deque[mmap.mmap]] = {}
        self._reused: dict[int, int] = {}  # sizes of mappings, by their identity

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Returns uninitialised bytes, 64-aligned."""
        if nbytes < POOLED_BYTES:
            return _small(nbytes)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = self._free[size].pop()
            self._reused[id(mapping)] = size
        except (KeyError, IndexError):
            try:
                mapping = _map(size)
            except OSError:  # too many mappings
                return _small(nbytes)
        return np.asarray(_Block(self, mapping))[:nbytes]

    def give_back(self, mapping: mmap.mmap) -> None:
        """Keeps a mapping that nobody uses any more, or drops it where enough are idle."""
        size = len(mapping)
        self._reused.pop(id(mapping), None)
        if self.idle_bytes() + size > self._idle_bytes or not hasattr(mmap, "MADV_FREE"):
            return
        mapping.madvise(mmap.MADV_FREE)
        self._free.setdefault(size, collections.deque()).append(mapping)

    def close(self) -> None:
        """Keeps nothing from now on: what the last arrays of an interpreter leave is unmapped."""
        self._idle_bytes = -1
        self._free.clear()

    def idle_bytes(self) -> int:
        """Returns how much is kept."""
        return sum(size * len(mappings) for size, mappings in list(self._free.items()))

    def reused_bytes(self) -> int:
        """Returns how much of what is in use was idle before.

        Linux counts anonymous pages that were marked as free among the clean pages of files, also
        those that have been written since, until it looks for pages to take.
        """
        return sum(list(self._reused.values()))


def _map(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _small(nbytes: int) -> np.ndarray[Any, Any]:
    memory = np.empty(nbytes + ALIGN_BYTES, np.uint8)
    lead = -memory.ctypes.data % ALIGN_BYTES
    return memory[lead : lead + nbytes]


POOL = MemoryPool()
atexit.register(POOL.close)

"""Leaves that every process keeps for itself: saved once for each, and given back to each on the same number of processes.

Such an array is stored whole for all processes, [processes, ...], each process having written its row; a Python value is a tuple of all.
Here a leaf of the record becomes the leaf that one process sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..format.grid import Grid
from ..format.record import ItemRecord, LeafRecord
from .reader import ArrayReader, ReadRequest


class PerProcessSelection(NamedTuple):
    """Whose copies come back: those of `process`. `processes`, unless None, is how many there have to be."""

    process: int
    processes: int | None = None


def own_leaves(item: ItemRecord, own: PerProcessSelection) -> ItemRecord:
    """Returns an item as one process sees it; a leaf that it has no copy of says so when it is wanted."""
    return replace(item, leaves=tuple(_own_leaf(leaf, own) if leaf.per_process else leaf for leaf in item.leaves))


def _own_leaf(leaf: LeafRecord, own: PerProcessSelection) -> LeafRecord:
    count, shape = len(leaf.value) if leaf.grid is None else leaf.shape[0], leaf.shape[1:]
    refusal = ""
    if own.process >= count or own.processes not in (None, count):
        wanted = f"of process {own.process}" if own.processes is None else f"for each of {own.processes} processes"
        refusal = (
            f"the leaf {leaf.path!r} was kept per process and is there for {count} processes, not {wanted}; to take the copy of one of "
            f"them, pass process=0 to {count - 1}; to leave it out, a `partial` that says no to it"
        )
    value = None if leaf.grid is not None or refusal else leaf.value[own.process]
    grid = None if leaf.grid is None else Grid(shape, shape, shape, leaf.grid.itemsize)
    return LeafRecord(leaf.path, leaf.kind, leaf.dtype, shape, leaf.impl, leaf.sharding, grid, None, value, True, refusal)


class OwnReader:
    """Reads one process's rows of what `reader` has of `item`: see `ItemReader.fill`."""

    def __init__(self, reader: ArrayReader, item: ItemRecord, own: PerProcessSelection) -> None:
        self._reader, self._process = reader, own.process
        self._whole = {leaf.path: leaf for leaf in item.leaves if leaf.per_process}

    def fill(self, targets: Sequence[ReadRequest], allocate: Callable[[int], np.ndarray[Any, Any]]) -> None:
        """Gives every target its array."""
        row = (self._process, self._process + 1)
        rows = {
            id(target): ReadRequest(self._whole[target.leaf.path], (row, *target.region)) for target in targets if target.leaf.per_process
        }
        self._reader.fill([rows.get(id(target), target) for target in targets], allocate)
        for target in targets:
            if id(target) in rows:
                found = rows[id(target)].array
                assert found is not None
                target.array = found[0]

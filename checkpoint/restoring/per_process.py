"""Leaves that every process keeps for itself.

They are saved once for each process, and given back to each on the same number of processes. Such
an array is stored whole for all processes, [processes, ...]: each process wrote its row. A Python
value is a tuple of all. Here a leaf of the record becomes the leaf that one process sees.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Self

import jax

from holdfast.multihost import Group

from ..errors import leaf_at
from ..format.grid import Grid
from ..format.record import ItemRecord, LeafRecord
from .array_views import SavedArray
from .reader import ArrayReader
from .view_reader import ViewReader


@dataclass(frozen=True)
class PerProcessSelection:
    """Selects the copies of `process`. `processes`, unless None, is how many there have to be."""

    process: int
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.process < 0:
            raise ValueError(f"process={self.process}: expected the number of a process, from 0 on")

    @classmethod
    def of(cls, process: int | None, group: Group | None) -> Self:
        """Returns a caller's choice; None: this process, of as many as the group or jax has."""
        if process is not None:
            return cls(operator.index(process))
        if group is not None:
            return cls(group.index, group.count)
        return cls(jax.process_index(), jax.process_count())


def leaves_of_process(item: ItemRecord, selection: PerProcessSelection) -> ItemRecord:
    """Returns an item as one process sees it.

    A leaf that the process has no copy of says so when it is wanted.
    """
    leaves = [
        _leaf_of_process(leaf, selection) if leaf.per_process else leaf for leaf in item.leaves
    ]
    return replace(item, leaves=tuple(leaves))


def _leaf_of_process(leaf: LeafRecord, selection: PerProcessSelection) -> LeafRecord:
    refusal = _refusal(leaf, selection)
    if leaf.grid is None:
        return replace(
            leaf, value=None if refusal else leaf.value[selection.process], refusal=refusal
        )
    shape = leaf.shape[1:]
    grid = Grid(shape, shape, shape, leaf.grid.itemsize)
    return replace(leaf, shape=shape, grid=grid, files=None, refusal=refusal)


def _refusal(leaf: LeafRecord, selection: PerProcessSelection) -> str:
    """Returns why a process has no copy of a leaf; "" where it has one."""
    count = len(leaf.value) if leaf.grid is None else leaf.shape[0]
    if selection.process < count and selection.processes in (None, count):
        return ""
    wanted = f"for each of {selection.processes} processes"
    if selection.processes is None:
        wanted = f"of process {selection.process}"
    return (
        f"{leaf_at(leaf.path)} was kept per process and is there for {count} processes, not"
        f" {wanted}; to take the copy of one of them, pass process=0 to {count - 1}; to leave"
        " it out, a `partial` that says no to it"
    )


def read_process(reader: ArrayReader, item: ItemRecord, process: int) -> ViewReader:
    """Returns the reader of one process's rows of what `reader` has of `item`."""
    row = ((process, process + 1),)
    views = {
        leaf.path: SavedArray.of(leaf, row)
        for leaf in item.leaves
        if leaf.per_process and leaf.grid is not None
    }
    return ViewReader(reader, views)

"""Leaves under the caller's names, and the reader that still finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..format.record import ItemRecord
from ..format.rename import Names, rename_all
from .reader import Allocate, ArrayReader, ReadRequest


class RenamedReader:
    """Fills leaves that go by other paths than the stored ones."""

    def __init__(self, reader: ArrayReader, renamed: ItemRecord, original: ItemRecord) -> None:
        self._reader = reader
        self._original = {
            new.path: old for new, old in zip(renamed.leaves, original.leaves, strict=True)
        }

    def fill(self, reads: Sequence[ReadRequest], allocate: Allocate) -> None:
        """Gives every request its array: see ArrayReader."""
        inner = [ReadRequest(self._original[read.leaf.path], read.region) for read in reads]
        self._reader.fill(inner, allocate)
        for read, filled in zip(reads, inner, strict=True):
            assert filled.array is not None
            read.take(filled.array)


def renamed(item: ItemRecord, names: Names) -> ItemRecord:
    """Returns the item with other paths. Its leaves keep their order, its tree is a flat dict."""
    new = rename_all(names, [leaf.path for leaf in item.leaves])
    leaves = tuple(replace(leaf, path=new[leaf.path]) for leaf in item.leaves)
    tree = {"kind": "dict", "keys": list(new.values()), "nodes": list(range(len(leaves)))}
    return ItemRecord(item.name, item.kind, item.files, tree, leaves)

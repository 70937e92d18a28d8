"""Leaves under the caller's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..errors import TreeMismatch
from ..format.likely_names import NamedLeaf, likely_renames
from ..format.record import ItemRecord
from ..format.rename import Names, matches, rename_all, renamer
from .match import listed
from .reader import ArrayReader
from .view_reader import read_by_other_paths


def check_rename(names: Names, items: Iterable[ItemRecord]) -> None:
    """Raises TreeMismatch where a mapping, or rules, match no leaf of any of the items.

    A function says itself what it leaves alone.
    """
    if not names or callable(names):
        return
    paths = [leaf.path for item in items for leaf in item.leaves]
    lefts = list(names) if isinstance(names, Mapping) else [pattern for pattern, _ in names]
    if not paths or any(matches(names, path) for path in paths):
        return
    likely = likely_renames(list(map(NamedLeaf, lefts)), list(map(NamedLeaf, paths)))
    pairs = {found: renamer(names)(left) for found, left in likely.items()}
    advice = f"perhaps rename={pairs}" if pairs else "write names of the checkpoint on the left"
    raise TreeMismatch(
        f"rename= matches no leaf, {advice}; it renames {listed(lefts)}, and the checkpoint has"
        f" {listed(paths)} (a function may leave all as they are)",
        expected=lefts[0],
        found=listed(paths),
    )


def renamed(item: ItemRecord, reader: ArrayReader, names: Names) -> tuple[ItemRecord, ArrayReader]:
    """Returns the item with other paths, and its reader.

    Its leaves keep their order, its tree is a flat dict.
    """
    new = rename_all(names, [leaf.path for leaf in item.leaves])
    leaves = tuple(replace(leaf, path=new[leaf.path]) for leaf in item.leaves)
    tree = {"kind": "dict", "keys": list(new.values()), "nodes": list(range(len(leaves)))}
    new_reader = read_by_other_paths(reader, leaves, item.leaves)
    return ItemRecord(item.name, item.kind, item.files, tree, leaves), new_reader

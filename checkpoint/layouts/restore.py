"""Restores items of an opened checkpoint of any layout, each by its `like`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import TreeMismatch
from ..format.json_state import State, decode, is_iterator
from ..format.own_files import Files, give_files
from ..format.record import ItemRecord
from ..format.tree import describe, escape
from ..restoring.match import SAVED, listed
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import ArrayReader
from ..restoring.renamed import check_rename, renamed
from ..restoring.restore import (
    RestoreOptions,
    check_files_like,
    check_json_like,
    owner_of,
    restore_tree,
)
from ..restoring.surgery import operate
from ..restoring.view_reader import read_by_other_paths
from .base import CheckpointInfo, CheckpointReader
from .holdfast import HoldfastCheckpoint

_USUAL_ITEMS = ("state", "default", "pytree")


def pick_item(info: CheckpointInfo, item: str) -> str:
    """Returns the item that `item` means.

    For our usual name in another layout that is the one tree there is, or a usual name there.
    """
    if item in info.items or item != "state" or info.layout == "holdfast":
        return item
    trees = [name for name, kind in info.items.items() if kind == "tree"]
    for name in _USUAL_ITEMS:
        if name in trees:
            return name
    return trees[0] if len(trees) == 1 else item


def restore_items(
    checkpoint: CheckpointReader, wanted: Mapping[str, Any], options: RestoreOptions
) -> dict[str, Any]:
    """Restores several items of any layout, each by its `like`: a tree, JSON, files, or the state
    of an iterator, which is the `like` and is returned. Blocks. "once" is for a step of ours with
    `peers`. An iterator gets its state when all else is there.

    Raises StepNotFound (no such item), TreeMismatch, Corrupt, HostileCheckpoint, StepGone.
    """
    info = checkpoint.info
    picked = {item: pick_item(info, item) for item in wanted}
    if options.rename is not None:
        trees = [
            checkpoint.item(item) for item in picked.values() if info.items.get(item) == "tree"
        ]
        check_rename(options.rename, trees)
    if options.rules is not None:
        check_one_tree(picked.values(), info)
    restored = {
        item: _restore(checkpoint, picked[item], like, options) for item, like in wanted.items()
    }
    options.check_choice()
    if info.owners:
        options.before_giving()
    return {
        item: value.give(wanted[item]) if isinstance(value, State) else value
        for item, value in restored.items()
    }


def check_one_tree(items: Iterable[str], info: CheckpointInfo) -> None:
    """Raises ValueError unless one of these items is a tree: rules of surgery are for one."""
    trees = [item for item in items if info.items.get(item) == "tree"]
    if len(trees) != 1:
        raise ValueError(
            f"rules=: expected one tree to operate on, found {trees} in {info.path}; name one item"
        )


def restore_checkpoint(
    checkpoint: CheckpointReader,
    item: str = "state",
    like: Any = None,
    options: RestoreOptions | None = None,
) -> Any:
    """Restores one item of any layout: see `restore_items`."""
    return restore_items(checkpoint, {item: like}, options or RestoreOptions())[item]


def _restore(checkpoint: CheckpointReader, item: str, like: Any, options: RestoreOptions) -> Any:
    """Returns one item; for an iterator the state that it is to have."""
    info = checkpoint.info
    own = options.per_process
    kind = info.items.get(item)
    if kind == "files" and is_iterator(like):
        return _read_grain_state(like, checkpoint, item, own)
    if kind == "files" or (kind is not None and isinstance(like, Files)):
        check_files_like(info.path, item, kind, like)
        return give_files(like, checkpoint.files(item, own), info.path)
    if kind == "json":
        return _restore_json(checkpoint, item, like, own)
    return _restore_tree(checkpoint, item, like, options)


def _restore_json(
    checkpoint: CheckpointReader, item: str, like: Any, own: PerProcessSelection | None
) -> Any:
    info = checkpoint.info
    check_json_like(info.path, item, like)
    process = own.process if own and own.processes is None else 0
    if item in info.owners or is_iterator(like):
        process = owner_of(info.path, item, info.processes, own)
    value = checkpoint.json(item, process)
    return State(decode(value)) if is_iterator(like) else value


def _restore_tree(
    checkpoint: CheckpointReader, item: str, like: Any, options: RestoreOptions
) -> Any:
    info = checkpoint.info
    wanted = checkpoint.item(item)
    shared = None
    if isinstance(checkpoint, HoldfastCheckpoint):
        shared = checkpoint.shared_reader(item, options.peers)
    reader = shared or checkpoint.reader(item)
    if options.rename is not None:
        wanted, reader = renamed(wanted, reader, options.rename)
    if options.rules is not None:
        wanted, reader = operate(wanted, reader, options.rules)
    is_spelled_so = info.layout == "holdfast" and options.rules is None
    if not is_spelled_so and like is not None and like is not SAVED:
        wanted, reader = _spelled_like(wanted, reader, like)
    try:
        values = restore_tree(reader, wanted, like, options)
    except TreeMismatch as error:
        error.path = error.path or info.path
        raise
    if shared is not None:
        shared.finish()
    return values


def _read_grain_state(
    like: Any, checkpoint: CheckpointReader, item: str, selection: PerProcessSelection | None
) -> State:
    """Returns the state that grain's handler wrote for a process.

    Grain writes a file for each process.
    """
    own = selection or PerProcessSelection(0)
    pattern = rf"process_{own.process}-of-{own.processes or '[0-9]+'}\.json"
    others = []
    for name, pieces in checkpoint.files(item):
        if re.fullmatch(pattern, name):
            text = b"".join(map(bytes, pieces))  # each piece holds until the next
            return State(text if isinstance(like.get_state(), bytes) else json.loads(text))
        others.append(name)
    expected = f"process_{own.process}-of-{own.processes or 'N'}.json"
    message = (
        f"{checkpoint.info.path}: the item {item!r} has {listed(sorted(others)) or 'no files'}, and"
        f" none is process {own.process}'s; expected {expected}; process=... takes another one's"
    )
    raise TreeMismatch(message, leaf=item, expected=expected)


def _spelled_like(
    item: ItemRecord, reader: ArrayReader, like: Any
) -> tuple[ItemRecord, ArrayReader]:
    """Lets flat names with dots match a flat `like` too, whose paths have the dots escaped."""
    wanted = set(describe(like)[1])
    spelled = tuple(replace(leaf, path=escape(leaf.path)) for leaf in item.leaves)
    as_they_are = sum(leaf.path in wanted for leaf in item.leaves)
    if as_they_are >= sum(leaf.path in wanted for leaf in spelled):
        return item, reader
    return replace(item, leaves=spelled), read_by_other_paths(reader, spelled, item.leaves)

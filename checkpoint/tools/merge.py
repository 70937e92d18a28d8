"""Makes one checkpoint of several that hold parts of one tree: their files stay as they are, and
one record names them all.

In a folder of a POSIX file system files get second names; elsewhere they are copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..format.record import fetch_record, parse_record
from ..steps.claims import FOLDER, this_writer, writer_of
from ..steps.object_claims import open_claims
from ..storage.base import NameTaken, Storage
from ..storage.path import StorePath
from ..storage.tombstone import RECORD_NAME, sealed_json

JsonObject: TypeAlias = dict[str, Any]


@dataclass
class _MergedItem:
    """A tree item that parts are added to. In `tree` a leaf is its number in `leaves`, for now."""

    tree: Any = field(default_factory=lambda: {"kind": "dict", "keys": [], "nodes": []})
    leaves: list[JsonObject] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)  # by the leaf's number
    runs: list[Any] = field(default_factory=list)
    shardings: list[Any] = field(default_factory=list)
    statics: JsonObject = field(default_factory=dict)
    files: list[Any] = field(default_factory=list)

    def add(self, other: JsonObject) -> None:
        """Adds a part. Raises ValueError where it has a path that is there, or is no dict."""
        first = len(self.leaves)
        values = iter(other["values"])
        for leaf in other["leaves"]:
            if "cells" not in leaf:
                self.values[len(self.leaves)] = next(values)
                self.leaves.append(leaf)
                continue
            cells = leaf["cells"] + len(self.runs)
            sharding = leaf["sharding"] + len(self.shardings)
            self.leaves.append(leaf | {"cells": cells, "sharding": sharding})
        offset = len(self.files)
        self.runs += [[[run[0] + offset, *run[1:]] for run in runs] for runs in other["cells"]]
        self.shardings += other["shardings"]
        self.statics |= other.get("statics", {})
        self.files += other["files"]
        self.tree = _merge(self.tree, _renumbered(other["tree"], lambda leaf: leaf + first), ())

    def to_json(self) -> JsonObject:
        """Returns the item as a record has it: leaves in the order of the tree."""
        order: list[int] = []  # of the numbers that leaves have had

        def number(old: int) -> int:
            order.append(old)
            return len(order) - 1

        return {
            "kind": "tree",
            "tree": _renumbered(self.tree, number),
            "leaves": [self.leaves[old] for old in order],
            "cells": self.runs,
            "shardings": self.shardings,
            "statics": self.statics,
            "values": [self.values[old] for old in order if old in self.values],
            "files": self.files,
        }


def _merge(one: Any, two: Any, path: tuple[str, ...]) -> Any:
    """Returns a node with the children of two dicts."""
    children = _children(one, path)
    for key, node in _children(two, path).items():
        children[key] = _merge(children[key], node, (*path, str(key))) if key in children else node
    keys = sorted(children)  # as jax has them
    return {"kind": "dict", "keys": keys, "nodes": [children[key] for key in keys]}


def _children(node: Any, path: tuple[str, ...]) -> dict[Any, Any]:
    if not isinstance(node, dict) or node["kind"] != "dict":
        where = ".".join(path) or "the tree itself"
        raise ValueError(f"{where} is in two parts, and not a dict in both")
    return dict(zip(node["keys"], node["nodes"], strict=True))


def _renumbered(node: Any, new: Callable[[int], int]) -> Any:
    if node is None:
        return None
    if isinstance(node, int):
        return new(node)
    return node | {"nodes": [_renumbered(child, new) for child in node["nodes"]]}


def merge_checkpoints(
    paths: Sequence[str], target: StorePath, item: str, metadata: Any = None
) -> None:
    """Makes `target` the checkpoint that has the trees of all parts as one: each has the one item
    `item`, a dict, and no two a path. All are on one file system, which has links.

    Nothing is there before everything is. The parts stay; their files are needed no longer. Blocks.
    Raises ValueError for parts that do not fit, NameTaken where a checkpoint is there,
    StepNotFound, Corrupt, the stores' OSErrors.
    """
    storage = target.storage
    parts = [StorePath(storage, os.path.relpath(path, storage.root)) for path in paths]
    records = [json.loads(fetch_record(storage, part.name)) for part in parts]
    data = _merged(records, item, metadata)
    merged = parse_record(data, f"{target}/{RECORD_NAME}")
    with _claimed(storage, records) as claim:
        try:
            for part, record in zip(parts, records, strict=True):
                _link_files(part, target, record["items"][item]["files"])
            storage.commit((target / RECORD_NAME).name, data, claim)
        except NameTaken:
            storage.delete([(target / name).name for name in merged.file_names()])
            raise


def _merged(records: Sequence[JsonObject], item: str, metadata: Any) -> bytes:
    """Returns the record of all parts as one."""
    merged = _MergedItem()
    for record in records:
        merged.add(record["items"][item])
    about = records[0] | {
        "processes": max(record["processes"] for record in records),
        "finished_s": time.time(),
        "metadata": metadata,
        "items": {item: merged.to_json()},
    }
    del about["crc32c"]
    return sealed_json(about)


@contextlib.contextmanager
def _claimed(storage: Storage, records: Sequence[JsonObject]) -> Iterator[str]:
    """Holds a claim to commit by, and those of the parts' writers: by these no sweep takes the
    files for those of dead writers.
    """
    claims = open_claims(storage)
    me = this_writer()
    holders = [me, *(replace(me, id=writer_of(record["writer"])) for record in records)]
    for writer in holders:
        claims.take(writer)
    try:
        yield me.claim
    finally:
        for writer in holders:
            claims.fence(writer.id)
        claims.forget_fenced()
        storage.delete([f"{FOLDER}/"])


def _link_files(origin: StorePath, target: StorePath, files: Sequence[Any]) -> None:
    store = target.storage.posix
    assert store is not None  # object stores have no links
    for name, size, *_ in files:
        new = target / name
        store.link((origin / name).name, new.name, size)
        store.make_durable(new.name.rpartition("/")[0])

"""Recognises and opens checkpoints that Orbax wrote, v0 and v1: their folders, items and
metadata.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from ...errors import Corrupt, HostileCheckpoint
from ...format.own_files import FileContents, is_own_name
from ...format.record import ItemRecord
from ...restoring.per_process import PerProcessSelection
from ...restoring.restore import VerifyReport
from ...storage.path import StorePath
from ..base import (
    CheckpointInfo,
    Entries,
    contents_of,
    files_below,
    find_named,
    parsing,
    verify_by_reading,
)
from . import metadata as orbax
from .arrays import OrbaxItem, context_of, optional_json

_NESTED = ("jax_random_key", "np_random_key")  # the folder inside an item of a random key
_OF_CHECKPOINT = {orbax.CHECKPOINT_METADATA, orbax.MARKER}
_OF_TREE = {orbax.TREE_METADATA, orbax.MANIFEST}
# What lies in the folder of one item, and in none of several.
_DIRECT = {*_OF_TREE, *(f"{nested}_metadata/" for nested in _NESTED)}


class OrbaxLayout:
    """Orbax's layout: a folder of items, or (v0, "direct") the files of one item."""

    name = "orbax"
    keeps_roots = True

    def recognises(self, folder: StorePath, names: Entries) -> bool:
        if orbax.TEMPORARY in folder.basename:
            return False
        if not (_OF_CHECKPOINT | _OF_TREE).isdisjoint(names):
            is_gcs = folder.storage.root.startswith(("gs://", "gcs_grpc://"))
            return orbax.COMMITTED in names or not is_gcs
        return _has_items(folder, [name[:-1] for name in names if name.endswith("/")])

    def open(self, folder: StorePath) -> OrbaxCheckpoint:
        return OrbaxCheckpoint(folder)

    def step_of(self, name: str) -> int | None:
        return orbax.step_of(name)


def _has_items(folder: StorePath, folders: Sequence[str]) -> bool:
    """Says whether some of the folders in a folder are items, and none a step."""
    numbered = [name for name in folders if orbax.step_of(name) is not None]
    others = [name for name in folders if name not in numbered]
    has_items = any(not _OF_TREE.isdisjoint((folder / name).names()) for name in others)
    # A root of steps may hold such a folder beside them.
    return has_items and not any(
        orbax.CHECKPOINT_METADATA in (folder / name).names() for name in numbered
    )


class OrbaxCheckpoint:
    """One checkpoint of Orbax's."""

    def __init__(self, folder: StorePath) -> None:
        self._folder = folder
        self._context = context_of(folder)
        self._items: dict[str, OrbaxItem] = {}
        self._lock = threading.Lock()
        names = folder.names()
        self._folders = self._find_items(names)
        with parsing(str(folder)):
            self.info = self._read_info(names)

    def _find_items(self, names: Entries) -> dict[str, tuple[StorePath, str]]:
        """Returns each item's folder and kind. A direct checkpoint is one item, "default"."""
        if not _DIRECT.isdisjoint(names):
            return {"default": _kind_of(self._folder)}
        deleted = json.dumps(optional_json(self._folder, names, orbax.DELETION))
        found = {
            name: _kind_of(self._folder / name)
            for name in sorted(name[:-1] for name in names if name.endswith("/"))
            if orbax.TEMPORARY not in name and f'"{name}"' not in deleted and name != "descriptor"
        }
        if not found and "metadata" in names:  # v0's JSON
            found["default"] = self._folder, "json"
        return found

    def _read_info(self, names: Entries) -> CheckpointInfo:
        about = optional_json(self._folder, names, orbax.CHECKPOINT_METADATA)
        # By item, or of the only one.
        self._handlers: Any = about.get("item_handlers") or {}
        metrics = about.get("metrics")
        where, kind = self._folders.get("metrics", (self._folder, ""))
        if not metrics and kind == "json":
            metrics = _read_json("metrics", where)
        if self._handlers and isinstance(self._handlers, dict):
            # Folders of which Orbax says nothing, and shows nothing, are somebody else's.
            self._folders = {
                name: (folder, kind)
                for name, (folder, kind) in self._folders.items()
                if name in self._handlers or kind != "files"
            }
        items = {name: kind for name, (_, kind) in self._folders.items() if name != "metrics"}
        return CheckpointInfo(
            "orbax",
            str(self._folder),
            items,
            orbax.step_of(self._folder.basename),
            started_s=_seconds(about.get("init_timestamp_nsecs")),
            finished_s=_seconds(about.get("commit_timestamp_nsecs")),
            metrics=metrics if isinstance(metrics, dict) else {},
            metadata=about.get("custom_metadata") or None,
        )

    def json(self, name: str, process: int = 0) -> Any:
        folder, _ = find_named(self.info, self._folders, name)
        return _read_json(name, folder)

    def files(self, name: str, selection: PerProcessSelection | None = None) -> FileContents:
        """Yields the files of an item whose handler only its writer knows; Orbax keeps no checksums
        of them.
        """
        folder, _ = find_named(self.info, self._folders, name)
        names = files_below(folder).keys()
        for own in names:
            if not is_own_name(own):
                raise HostileCheckpoint(
                    f"{folder}: {own!r} is no name for a file", path=str(folder)
                )
        yield from contents_of(folder, sorted(names - {orbax.COMMITTED}))

    def item(self, name: str) -> ItemRecord:
        return self._open(name).record

    def reader(self, name: str) -> OrbaxItem:
        return self._open(name)

    def _open(self, name: str) -> OrbaxItem:
        folder, _ = find_named(self.info, self._folders, name)
        with self._lock:
            if name not in self._items:
                handlers = self._handlers
                handler = handlers.get(name, "") if isinstance(handlers, dict) else handlers
                with parsing(str(folder)):
                    self._items[name] = OrbaxItem(name, folder, self._context, str(handler))
            return self._items[name]

    def verify(self) -> VerifyReport:
        return verify_by_reading(self, len(files_below(self._folder)))


def _kind_of(folder: StorePath) -> tuple[StorePath, str]:
    """Returns the folder that holds an item's files, and the item's kind."""
    names = folder.names()
    for nested in _NESTED:
        if nested + "/" in names:
            return folder / nested, "tree"
    if not {*_OF_TREE, f"{orbax.ARRAY_METADATAS}/"}.isdisjoint(names):
        return folder, "tree"
    if any(name in names for name in orbax.JSON_FILES):
        return folder, "json"
    return folder, "files"


def _read_json(item: str, folder: StorePath) -> Any:
    names = folder.names()
    for file in orbax.JSON_FILES:
        if file in names:
            return orbax.parse_json(folder.fetch(file), f"{folder}/{file}")
    raise Corrupt(
        f"{folder} has none of {', '.join(orbax.JSON_FILES)}; the item '{item}' has lost its data",
        file=str(folder),
    )


def _seconds(time_ns: Any) -> float | None:
    return time_ns / 1e9 if isinstance(time_ns, int) and time_ns else None

"""Recognises and opens checkpoints that Orbax wrote, v0 and v1: their folders, items and metadata. The arrays are `_orbax_item.py`'s."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from ...errors import Corrupt, StepNotFound
from ...format.record import ItemRecord
from ...restoring.restore import VerifyReport
from ...storage.base import Entry
from ...storage.path import StorePath
from ..base import Info, verify_by_reading
from ..orbax import metadata as files
from .arrays import OrbaxItem, context_of

_NESTED = ("jax_random_key", "np_random_key")  # the folder inside an item of a random key


class OrbaxLayout:
    """Is Orbax's layout: a folder of items, or (v0, "direct") the files of one item."""

    name = "orbax"

    def recognises(self, place: StorePath, names: Mapping[str, Entry]) -> bool:
        if files.TEMPORARY in place.basename:
            return False
        if files.CHECKPOINT_METADATA in names or files.MARKER in names or files.TREE_METADATA in names or files.MANIFEST in names:
            return not place.storage.root.startswith("gs://") or files.COMMITTED in names
        folders = [name for name in names if name.endswith("/") and files.step_of(name[:-1]) is None]
        return any(not {files.TREE_METADATA, files.MANIFEST}.isdisjoint((place / name[:-1]).names()) for name in folders)

    def open(self, place: StorePath) -> OrbaxSource:
        return OrbaxSource(place)

    def step_of(self, name: str) -> int | None:
        return files.step_of(name)


class OrbaxSource:
    """Is one checkpoint of Orbax's."""

    def __init__(self, place: StorePath) -> None:
        self._place = place
        self._context = context_of(place)
        self._items: dict[str, OrbaxItem] = {}
        self._lock = threading.Lock()
        names = place.names()
        self._folders = self._find_items(names)
        self.info = self._read_info(names)

    def _find_items(self, names: Mapping[str, Entry]) -> dict[str, tuple[StorePath, str]]:
        """Returns each item's folder and kind. A direct checkpoint is one item, "default"."""
        if files.TREE_METADATA in names or files.MANIFEST in names:
            return {"default": (self._place, "tree")}
        gone = self._deleted(names)
        found = {}
        for name in sorted(name[:-1] for name in names if name.endswith("/")):
            if files.TEMPORARY not in name and name not in gone and name != "descriptor":
                found[name] = _kind_of(self._place / name)
        return found

    def _deleted(self, names: Mapping[str, Entry]) -> set[str]:
        if files.DELETION not in names:
            return set()
        value = files.parse_json(self._place.fetch(files.DELETION), f"{self._place}/{files.DELETION}")
        text = json.dumps(value)
        return {name[:-1] for name in names if name.endswith("/") and f'"{name[:-1]}"' in text}

    def _read_info(self, names: Mapping[str, Entry]) -> Info:
        about: Any = {}
        if files.CHECKPOINT_METADATA in names:
            about = files.parse_json(self._place.fetch(files.CHECKPOINT_METADATA), f"{self._place}/{files.CHECKPOINT_METADATA}")
        about = about if isinstance(about, dict) else {}
        metrics = about.get("metrics") or {}
        if not metrics and self._folders.get("metrics", (None, ""))[1] == "json":
            metrics = self.json("metrics")
        times = [about.get(name) for name in ("init_timestamp_nsecs", "commit_timestamp_nsecs")]
        started, finished = [time / 1e9 if isinstance(time, int) and time else None for time in times]
        items = {name: kind for name, (_, kind) in self._folders.items() if name != "metrics"}
        metrics = metrics if isinstance(metrics, dict) else {}
        step = files.step_of(self._place.basename)
        return Info("orbax", str(self._place), items, step, started, finished, metrics, about.get("custom_metadata") or None)

    def json(self, name: str) -> Any:
        place, _ = self._folder(name)
        names = place.names()
        for file in files.JSON_FILES:
            if file in names:
                return files.parse_json(place.fetch(file), f"{place}/{file}")
        raise Corrupt(f"{place} has none of {', '.join(files.JSON_FILES)}; the item '{name}' has lost its data", file=str(place))

    def _folder(self, name: str) -> tuple[StorePath, str]:
        if name not in self._folders:
            known = ", ".join(sorted(self._folders)) or "none"
            raise StepNotFound(f"{self._place} has no item '{name}'; it has: {known}", path=str(self._place))
        return self._folders[name]

    def item(self, name: str) -> ItemRecord:
        return self._open(name).record

    def reader(self, name: str) -> OrbaxItem:
        return self._open(name)

    def _open(self, name: str) -> OrbaxItem:
        place, kind = self._folder(name)
        if kind != "tree":
            raise StepNotFound(f"the item '{name}' of {self._place} is no tree of arrays", path=str(self._place))
        with self._lock:
            if name not in self._items:
                self._items[name] = OrbaxItem(name, place, self._context)
            return self._items[name]

    def verify(self) -> VerifyReport:
        return verify_by_reading(self, len(self._place.storage.list(self._place.name, recursive=True)))


def _kind_of(place: StorePath) -> tuple[StorePath, str]:
    """Returns the folder that holds an item's files, and the item's kind."""
    names = place.names()
    for nested in _NESTED:
        if nested + "/" in names:
            return place / nested, "tree"
    if files.TREE_METADATA in names or files.MANIFEST in names or files.ARRAY_METADATAS + "/" in names:
        return place, "tree"
    if any(name in names for name in files.JSON_FILES):
        return place, "json"
    return place, "unknown"

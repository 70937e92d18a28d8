"""Our own layout behind the seam for layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..format.record import ItemRecord, Record, read_record
from ..restoring.reader import ArrayReader, ItemReader
from ..restoring.restore import VerifyReport, read_json, verify_step
from ..storage.base import Entry
from ..storage.path import StorePath, join
from ..storage.tombstone import RECORD_NAME
from .base import Info, find


class HoldfastLayout:
    """Is our own layout: a folder with a record."""

    name = "holdfast"

    def recognises(self, place: StorePath, names: Mapping[str, Entry]) -> bool:
        return RECORD_NAME in names

    def open(self, place: StorePath) -> HoldfastSource:
        return HoldfastSource(place)

    def step_of(self, name: str) -> int | None:
        return int(name) if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0") and len(name) <= 18 else None


class HoldfastSource:
    """Is one of our own checkpoints."""

    def __init__(self, place: StorePath) -> None:
        self._place = place
        self.record: Record = read_record(place.storage, place.name)
        items = {name: item.kind for name, item in self.record.items.items()}
        times = (self.record.started_s, self.record.finished_s)
        self.info = Info("holdfast", str(place), items, self.record.step, *times, self.record.metrics, self.record.metadata)

    def item(self, name: str) -> ItemRecord:
        found: ItemRecord = find(self.info, self.record.items, name)
        return found

    def reader(self, name: str) -> ArrayReader:
        return ItemReader(self._place.storage, self._place.name, self.item(name))

    def json(self, name: str) -> Any:
        return read_json(self._place.storage, self._place.name, self.record, name)

    def misfits(self) -> list[str]:
        """Returns what a look at the folder tells is wrong: files that are missing or, where listings tell sizes, cut off or grown."""
        there = {entry.name: entry.size for entry in self._place.storage.list(self._place.name, recursive=True)}
        tells_sizes, found = "://" not in self._place.storage.root, []
        for item in self.record.items.values():
            for file in item.files:
                name = join(self._place.name, file.name)
                if name not in there:
                    found.append(f"{file.name} is missing")
                elif tells_sizes and there[name] != file.size:
                    found.append(f"{file.name} has {there[name]} of {file.size} bytes")
        return found

    def verify(self) -> VerifyReport:
        return verify_step(self._place.storage, self._place.name, self.record)

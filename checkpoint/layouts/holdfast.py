"""Our own layout behind the seam for layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import StepGone, StepNotFound
from ..format.record import ItemRecord, Record, read_record
from ..format.step_folders import step_of
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import ArrayReader, ItemReader
from ..restoring.restore import (
    VerifyReport,
    open_files,
    read_json,
    verify_step,
)
from ..restoring.shared_reader import SharedReader, shared_reader
from ..restoring.sharing import RestorePeers
from ..storage.base import Entry
from ..storage.path import StorePath, join
from ..storage.tombstone import RECORD_NAME
from .base import CheckpointInfo, find_named


class HoldfastLayout:
    """Our own layout: a folder with a record."""

    name = "holdfast"
    keeps_roots = True

    def recognises(self, folder: StorePath, names: Mapping[str, Entry]) -> bool:
        return RECORD_NAME in names

    def open(self, folder: StorePath) -> HoldfastCheckpoint:
        return HoldfastCheckpoint(folder)

    def step_of(self, name: str) -> int | None:
        return step_of(name)


class HoldfastCheckpoint:
    """One of our own checkpoints."""

    def __init__(self, folder: StorePath, record: Record | None = None) -> None:
        self._folder = folder
        record = record or read_record(folder.storage, folder.name)
        self.record = record
        owners = {}
        for name, item in record.items.items():
            if item.kind == "json" and len(item.files) > 1:
                owners[name] = len(item.files)
            elif item.per_process:
                owners[name] = record.processes
        self.info = CheckpointInfo(
            "holdfast",
            str(folder),
            {name: item.kind for name, item in record.items.items()},
            record.step,
            started_s=record.started_s,
            finished_s=record.finished_s,
            metrics=record.metrics,
            metadata=record.metadata,
            save_id=record.writer_id,
            owners=owners,
            processes=record.processes,
        )

    def item(self, name: str) -> ItemRecord:
        item: ItemRecord = find_named(self.info, self.record.items, name)
        return item

    def reader(self, name: str) -> ArrayReader:
        return ItemReader(self._folder.storage, self._folder.name, self.item(name))

    def shared_reader(self, name: str, peers: RestorePeers | None) -> SharedReader | None:
        """Returns a reader that passes on what several processes need, where that is worth it."""
        return shared_reader(self._folder.storage, self._folder.name, self.item(name), peers)

    def json(self, name: str, process: int = 0) -> Any:
        folder = self._folder
        return read_json(folder.storage, folder.name, self.record, name, process=process)

    def files(
        self, name: str, selection: PerProcessSelection | None = None
    ) -> Iterator[tuple[str, Iterator[memoryview]]]:
        folder = self._folder
        return open_files(folder.storage, folder.name, self.record, name, selection=selection)

    def misfits(self, entries: Sequence[Entry]) -> list[str]:
        """Returns what is wrong with the folder, in which these files are: those that are missing
        or, where a listing has sizes, of another size. Raises StepGone where the checkpoint is
        another one by now, or none.
        """
        sizes = {entry.name: entry.size for entry in entries}
        problems = []
        for item in self.record.items.values():
            for file in item.files:
                name = join(self._folder.name, file.name)
                if name not in sizes:
                    problems.append(f"{file.name} is missing")
                elif sizes[name] not in (None, file.size):
                    problems.append(f"{file.name} has {sizes[name]} of {file.size} bytes")
        if problems:
            try:
                now = read_record(self._folder.storage, self._folder.name)
            except StepNotFound as error:
                message = f"{self._folder} was deleted while it was being read"
                raise StepGone(message, path=str(self._folder)) from error
            if now.writer_id != self.record.writer_id:
                message = f"{self._folder} was overwritten while it was being read"
                raise StepGone(message, path=str(self._folder))
        return problems

    def verify(self) -> VerifyReport:
        return verify_step(self._folder.storage, self._folder.name, self.record)

"""Our own layout behind the seam for layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import HostileCheckpoint, StepGone, StepNotFound
from ..format.own_files import FileContents
from ..format.record import ItemRecord, Record, read_record
from ..format.step_folders import step_of
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import ItemReader
from ..restoring.restore import VerifyReport, owner_of
from ..restoring.restore_peers import RestorePeers
from ..restoring.shared_reader import SharedReader, shared_reader
from ..storage.base import Entry, Readable
from ..storage.path import StorePath, join
from ..storage.tombstone import RECORD_NAME
from .base import CheckpointInfo, Entries, find_named


class HoldfastLayout:
    """Our own layout: a folder with a record."""

    name = "holdfast"
    keeps_roots = True

    def recognises(self, folder: StorePath, names: Entries) -> bool:
        return RECORD_NAME in names

    def open(self, folder: StorePath) -> HoldfastCheckpoint:
        return HoldfastCheckpoint(folder.storage, folder.name)

    def step_of(self, name: str) -> int | None:
        return step_of(name)


class HoldfastCheckpoint:
    """One of our own checkpoints."""

    def __init__(self, storage: Readable, folder: str = "", record: Record | None = None) -> None:
        self._storage = storage
        self._folder = folder
        record = record or read_record(storage, folder)
        self.record = record
        self.info = CheckpointInfo(
            "holdfast",
            join(storage.root, folder),
            {name: item.kind for name, item in record.items.items()},
            record.step,
            started_s=record.started_s,
            finished_s=record.finished_s,
            metrics=record.metrics,
            metadata=record.metadata,
            save_id=record.writer_id,
            owners=_owners_in(record),
            processes=record.processes,
        )

    def item(self, name: str) -> ItemRecord:
        item: ItemRecord = find_named(self.info, self.record.items, name)
        return item

    def reader(self, name: str) -> ItemReader:
        return ItemReader(self._storage, self._folder, self.item(name))

    def shared_reader(self, name: str, peers: RestorePeers | None) -> SharedReader | None:
        """Returns a reader that passes on what several processes need, where that is worth it."""
        return shared_reader(self._storage, self._folder, self.item(name), peers)

    def json(self, name: str, process: int = 0) -> Any:
        item = self.item(name)
        path = self.record.path
        is_shared = len(item.files) == 1 < self.record.processes
        for file in item.files if item.kind == "json" else ():
            if is_shared or file.name.startswith(f"{name}/{process:05d}-j-"):
                data = self.reader(name).read_whole(file)
                try:
                    return json.loads(data)
                except (ValueError, RecursionError) as error:
                    raise HostileCheckpoint(
                        f"{path}: {file.name} is not JSON", path=path, file=file.name
                    ) from error
        raise StepNotFound(
            f"{path}: process {process} wrote nothing for the item {name!r}",
            path=path,
            step=self.record.step,
        )

    def files(self, name: str, selection: PerProcessSelection | None = None) -> FileContents:
        """Yields the files of an item. The bytes are checked after the last piece."""
        item = self.item(name)
        owner = ""
        if item.per_process:
            process = owner_of(self.record.path, name, self.record.processes, selection)
            owner = f"{process:05d}/"
        reader = self.reader(name)
        for own, file in zip(item.names, item.files, strict=True):
            if own.startswith(owner):
                yield own.removeprefix(owner), reader.pieces(file)

    def misfits(self, entries: Sequence[Entry]) -> list[str]:
        """Returns what is wrong with the folder, in which these files are: those that are missing
        or, where a listing has sizes, of another size. Raises StepGone where the checkpoint is
        another one by now, or none.
        """
        sizes = {entry.name: entry.size for entry in entries}
        problems = []
        for item in self.record.items.values():
            for file in item.files:
                name = join(self._folder, file.name)
                if name not in sizes:
                    problems.append(f"{file.name} is missing")
                elif sizes[name] not in (None, file.size):
                    problems.append(f"{file.name} has {sizes[name]} of {file.size} bytes")
        if problems:
            self._check_is_there()
        return problems

    def _check_is_there(self) -> None:
        path = self.info.path
        try:
            now = read_record(self._storage, self._folder)
        except StepNotFound as error:
            raise StepGone(f"{path} was deleted while it was being read", path=path) from error
        if now.writer_id != self.record.writer_id:
            raise StepGone(f"{path} was overwritten while it was being read", path=path)

    def verify(self) -> VerifyReport:
        leaves = total = 0
        for name, item in self.record.items.items():
            reader = self.reader(name)
            if item.kind == "tree":
                leaves += len(item.leaves)
                reader.check_all()
            else:
                check = reader.read_whole if item.kind == "json" else reader.check_file
                for file in item.files:
                    check(file)
            total += sum(file.size for file in item.files)
        files = len(self.record.file_names())
        return VerifyReport(self.info.path, self.record.step, files, leaves, bytes=total)


def _owners_in(record: Record) -> dict[str, int]:
    owners = {}
    for name, item in record.items.items():
        if item.kind == "json" and len(item.files) > 1:
            owners[name] = len(item.files)
        elif item.per_process:
            owners[name] = record.processes
    return owners

"""One local save on one process: its part is written, and the parts of peers are copied."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.multihost import Group

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import (
    BranchStart,
    Prepared,
    SaveReport,
    SaveResult,
    TierTooLarge,
)
from ..options import Local, Options
from ..saving.commit import SaveWork
from ..saving.record_builder import tree_text
from ..saving.save import SnapshotWork
from ..saving.stager import OneSave
from ..steps.lineage import Branch, Lineage, NoLineage
from .host_folder import HostFolder, HostStorage, RunFolder
from .meeting import Meeting
from .part_copier import PartCopier
from .parts import LocalKey, Part, StepHead


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """What all local saves of a process share."""

    local: Local
    path: Path
    storage: HostStorage
    group: Group
    options: Options
    meeting: Meeting
    copier: PartCopier
    lineage: Lineage | NoLineage
    writer_id: str
    folders: RunFolder

    @property
    def messages(self) -> str:
        """What the names of the tier's messages begin with."""
        return f"checkpoint/{self.writer_id}/local"

    def serve(self, part: Part, folder: HostFolder) -> None:
        """Lets peers read a part of this host."""
        if self.meeting.server is not None:
            self.meeting.server.publish(folder.path, part.name, part.files)

    def withdraw(self, folders: Iterable[str]) -> None:
        """Lets peers read nothing more of these local saves."""
        for name in folders:
            if self.meeting.server is not None:
                self.meeting.server.withdraw(name)


class LocalSave(SaveWork):
    """The work of one process in a local save: see `SaveWork`.

    `branch`, `key` and `folder` are None until the branch of the save is known. `known` are the
    local steps that may come back, best first; an unsure process gives None, and deletes nothing.
    """

    def __init__(self, place: HostPlace, save: OneSave, known: Sequence[LocalKey] | None) -> None:
        self._place = place
        self._save = save
        self._known = known
        self._snapshots: SnapshotWork | None = None
        self.branch: BranchStart | None = None
        self.key: LocalKey | None = None
        self.folder: HostFolder | None = None
        self.copied_bytes = 0

    def write(self) -> Prepared:
        """Writes this process's part, copies those of peers, and reports its own."""
        try:
            return Prepared(self._write_and_copy().items)
        except Exception:
            # A peer that waits for this part hears at once that it will not come.
            if self._place.meeting.server is not None and self.key is not None:
                self._place.meeting.server.give_up(self.key.part_name(self._place.group.index))
            raise

    def _write_and_copy(self) -> Part:
        place = self._place
        save = self._save
        branch = self._agree_on_branch()
        self.branch = branch.start
        key = LocalKey(save.step, branch.number, save.key.save_id, place.group.count)
        self.key = key
        folder = place.folders.open(branch.run)
        self.folder = folder
        self._make_room(folder, branch)
        save.move(folder.storage, key.folder)
        self._snapshots = SnapshotWork(save)
        part = self._write_part(key, folder, self._snapshots)
        for owner in place.meeting.copies_from:
            copied = place.copier.copy(owner, key, folder, save)
            place.serve(copied, folder)
            self.copied_bytes += sum(copied.files.values())
        return part

    def _agree_on_branch(self) -> Branch:
        """Returns the branch of this save, once its file is durable: see `Lineage`."""

        def begin() -> Branch:
            end_s = self._save.end_s
            branch = self._place.lineage.current(self._save.key, self._save.place, end_s)
            assert branch is not None
            return branch

        name = f"{self._save.messages}/begin"
        fields = ask_primary(
            self._place.group,
            name,
            begin,
            self._place.local.timeout_s,
            question=self._save.key.save_id,
        )
        return Branch(**fields)

    def _write_part(self, key: LocalKey, folder: HostFolder, work: SnapshotWork) -> Part:
        save = self._save
        items = work.write().items
        head = None
        if self._place.group.index == 0:
            trees = {name: tree_text(plan) for name, plan in save.plans.items()}
            head = StepHead(
                trees,
                save.started_s,
                time.time(),
                metrics=save.metrics,
                metadata=save.metadata,
            )
        part = Part(folder.run, key, self._place.group.index, items, head=head)
        folder.publish(part, part.to_bytes())
        self._place.serve(part, folder)
        return part

    def _make_room(self, folder: HostFolder, branch: Branch) -> None:
        """Deletes what is dead by now, and refuses a save that there is no room for."""
        place = self._place
        keep = place.local.keep
        if place.meeting.is_lister and self._known is not None:
            stay = [key for key in self._known if key.step <= branch.base][:keep]
            place.withdraw(folder.prune(branch.number, place.writer_id, stay))
        others = len(place.meeting.copies_from)
        need = self._save.own_bytes * (1 + others)
        most = place.local.max_bytes
        if most is not None and need * (keep + 1) > most:
            raise TierTooLarge(
                f"{keep + 1} local steps with the copies of {others} other processes need"
                f" {need * (keep + 1):,} bytes here, above max_bytes={most:,}; raise it, or lower"
                " replicas or keep"
            )
        # Files that are written over give their bytes back.
        free = shutil.disk_usage(place.path).free + folder.storage.spare_bytes()
        if need > free:
            raise OSError(errno.ENOSPC, self._why_full(need, free, folder.run), str(place.path))

    def _why_full(self, need: int, free: int, run: str) -> str:
        runs = [path.name for path in self._place.path.iterdir() if path.is_dir()]
        others = sorted(name for name in runs if name != run)
        held = f"; folders of other runs hold some: {', '.join(others[:4])}" if others else ""
        return (
            f"a local step and its copies need {need:,} bytes here, {free:,} are free{held};"
            " make room, or name another folder"
        )

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record that a restore would build, which readers take."""
        assert self._snapshots is not None
        return self._snapshots.build(reports)

    # --- the end

    def delete(
        self, keys: Sequence[LocalKey], stay: Sequence[LocalKey], result: SaveResult
    ) -> None:
        """Lets the parts of local saves go that this process has written, and of what earlier
        attempts have left all but those that stay. Raises OSError.
        """
        if self.folder is None or self.key is None:
            return
        # Before the files go: a peer that asks hears that they are not there.
        self._place.withdraw(key.folder for key in keys)
        for key in keys:
            more_files: list[str] = []
            if key == self.key:
                more_files = [f"{key.folder}/{name}" for name in self._save.begun]
            self.folder.let_go(key, more_files)
        if result.error is None and self._known is not None and self._place.meeting.is_lister:
            self._place.withdraw(self.folder.prune(self.key.branch, self._place.writer_id, stay))

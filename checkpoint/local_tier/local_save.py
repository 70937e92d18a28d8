"""One local save on one process: its part is written, and the parts of peers are copied."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import (
    BranchStart,
    Prepared,
    SaveReport,
    SaveResult,
    TierTooLarge,
)
from ..saving.commit import SaveWork
from ..saving.record_builder import tree_text
from ..saving.save import SnapshotWork
from ..saving.stager import OneSave
from ..steps.lineage import Branch
from .host_folder import HostFolder
from .host_place import HostPlace
from .parts import LocalKey, Part, StepHead


class LocalSave(SaveWork):
    """The work of one process in a local save: see `SaveWork`.

    `branch`, `key` and `folder` are None until the branch of the save is known. `known` are the
    local steps that may come back, best first; an unsure process gives None, and deletes nothing.
    """

    def __init__(self, place: HostPlace, save: OneSave, known: Sequence[LocalKey] | None) -> None:
        self._place = place
        self._save = save
        self._process = place.root.group.index
        self._cleans = known is not None and place.meeting.is_lister
        self._known = known or ()
        self._snapshots = SnapshotWork(save)
        self.branch: BranchStart | None = None
        self.key: LocalKey | None = None
        self.folder: HostFolder | None = None
        self.copied_bytes = 0

    def write(self) -> Prepared:
        """Writes this process's part, copies those of peers, and reports its own."""
        try:
            key, folder = self._make_target()
            return Prepared(self._write_and_copy(key, folder).items)
        except Exception:
            # A peer that waits for this part hears at once that it will not come.
            if self._place.meeting.server is not None and self.key is not None:
                self._place.meeting.server.give_up(self.key.part_name(self._process))
            raise

    def _make_target(self) -> tuple[LocalKey, HostFolder]:
        """Agrees on the branch of the save, which then goes to a folder with room for it."""
        save = self._save
        branch = self._agree_on_branch()
        self.branch = branch.start
        self.key = LocalKey(save.step, branch.number, save.key.save_id, save.group.count)
        self.folder = self._place.folders.open(branch.run)
        self._make_room(self.folder, branch)
        save.move(self.folder.storage, self.key.folder)
        return self.key, self.folder

    def _write_and_copy(self, key: LocalKey, folder: HostFolder) -> Part:
        place = self._place
        part = self._write_part(key, folder)
        for owner in place.meeting.copies_from:
            copied = place.copier.copy(owner, key, folder, self._save)
            place.serve(copied, folder)
            self.copied_bytes += sum(copied.files.values())
        return part

    def _agree_on_branch(self) -> Branch:
        """Returns the branch of this save, once its file is durable: see `Lineage`."""
        save = self._save

        def begin() -> Branch:
            # It may have failed before its place was known: a branch would leave all steps behind.
            if save.broken is not None:
                raise save.broken
            assert self._place.lineage is not None
            branch = self._place.lineage.current(save.key, save.place, save.end_s)
            assert branch is not None
            return branch

        return Branch(
            **ask_primary(
                save.group,
                f"{save.messages}/begin",
                begin,
                self._place.local.timeout_s,
                question=save.key.save_id,
            )
        )

    def _write_part(self, key: LocalKey, folder: HostFolder) -> Part:
        save = self._save
        items = self._snapshots.write().items
        head = None
        if self._process == 0:
            trees = {name: tree_text(plan) for name, plan in save.plans.items()}
            head = StepHead(
                trees,
                save.started_s,
                time.time(),
                metrics=save.metrics,
                metadata=save.metadata,
            )
        part = Part(folder.run, key, self._process, items, head=head)
        folder.publish(part, part.to_bytes())
        self._place.serve(part, folder)
        return part

    def _make_room(self, folder: HostFolder, branch: Branch) -> None:
        """Deletes what is dead by now, and refuses a save that there is no room for."""
        place = self._place
        keep = place.local.keep
        if self._cleans:
            stay = [key for key in self._known if key.step <= branch.base][:keep]
            place.withdraw(folder.prune(branch.number, place.root.writer.id, stay))
        others = len(place.meeting.copies_from)
        need = self._save.own_bytes * (1 + others)
        most = place.local.max_bytes
        if most is not None and need * (keep + 1) > most:
            raise TierTooLarge(
                f"{keep + 1} local steps with the copies of {others} other processes need"
                f" {need * (keep + 1):,} bytes here, above max_bytes={most:,}; raise it, or lower"
                " replicas or keep"
            )
        _refuse_without_room(Path(place.root.where), folder, need)

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record that a restore would build, which readers take."""
        return self._snapshots.build(reports)

    # --- the end

    def delete(
        self, keys: Sequence[LocalKey], stay: Sequence[LocalKey], result: SaveResult
    ) -> None:
        """Lets the parts of local saves go that this process has written, and of what earlier
        attempts have left all but those that stay. Raises OSError.
        """
        assert self.folder is not None and self.key is not None  # made before any save may go
        # Before the files go: a peer that asks hears that they are not there.
        self._place.withdraw(key.folder for key in keys)
        for key in keys:
            begun = self._save.begun if key == self.key else ()
            self.folder.let_go(key, [f"{key.folder}/{name}" for name in begun])
        if result.error is None and self._cleans:
            writer_id = self._place.root.writer.id
            self._place.withdraw(self.folder.prune(self.key.branch, writer_id, stay))


def _refuse_without_room(where: Path, folder: HostFolder, need: int) -> None:
    # Files that are written over give their bytes back.
    free = shutil.disk_usage(where).free + folder.storage.spare_bytes()
    if need > free:
        held = _other_runs(where, folder.run)
        raise OSError(
            errno.ENOSPC,
            f"a local step and its copies need {need:,} bytes here, {free:,} are free{held};"
            " make room, or name another folder",
            str(where),
        )


def _other_runs(where: Path, run: str) -> str:
    """Returns which folders of other runs hold some of a host's room, for a sentence."""
    others = sorted(path.name for path in where.iterdir() if path.is_dir() and path.name != run)
    return f"; folders of other runs hold some: {', '.join(others[:4])}" if others else ""

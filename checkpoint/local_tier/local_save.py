"""One local save on one process: its part is written, and the parts of peers are copied."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.multihost import Group

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import BranchStart, SaveReport, SaveResult, Superfluous, TierTooLarge
from ..format.item_report import ItemReport
from ..options import Local, Options
from ..saving.commit import SaveTarget
from ..saving.plan import Plan
from ..saving.record_builder import tree_text
from ..saving.replicas import ReplicaSums
from ..saving.save import MESSAGE_NAMES, SnapshotWork
from ..saving.stager import SaveRequest
from ..steps.lineage import Branch, Lineage, NoLineage
from .host_folder import HostFolder, HostStorage, RunFolder
from .meeting import Meeting
from .part_copier import PartCopier
from .parts import LocalKey, Part, StepHead

# for the reports, once the parts had their time: a process that is late still says why
REPORT_WAIT_S = 1.0


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


class LocalSave:
    """The work of one process in a local save: see `SaveWork`.

    `branch`, `key` and `folder` are None until the branch of the save is known. `known` are the
    local steps that may come back, best first; an unsure process gives None, and deletes nothing.
    """

    def __init__(
        self, place: HostPlace, request: SaveRequest, known: Sequence[LocalKey] | None
    ) -> None:
        self._place = place
        self._request = request
        self._known = known
        self._snapshots: SnapshotWork | None = None
        self.branch: BranchStart | None = None
        self.key: LocalKey | None = None
        self.folder: HostFolder | None = None
        self.copied_bytes = 0
        self._parts_target = SaveTarget(
            place.storage,
            place.group,
            request.key,
            folder="",
            claim="",
            messages=f"{place.messages}/{request.counter % MESSAGE_NAMES}",
            timeout_s=place.local.timeout_s,
            refuses_drift=place.options.on_replicas_differ == "raise",
            is_local=True,
            began=request.began,
            cancellation=request.cancellation,
        )

    @property
    def target(self) -> SaveTarget:
        """Where the save goes, with the time that its reports have."""
        timeout_s = self._parts_target.timeout_s + REPORT_WAIT_S
        return replace(self._parts_target, timeout_s=timeout_s)

    def write(self) -> Mapping[str, ItemReport]:
        """Writes this process's part, copies those of peers, and reports its own."""
        try:
            return self._write_and_copy().items
        except Exception:
            # A peer that waits for this part hears at once that it will not come.
            if self._place.meeting.server is not None and self.key is not None:
                self._place.meeting.server.give_up(self.key.part_name(self._place.group.index))
            raise

    def _write_and_copy(self) -> Part:
        place = self._place
        request = self._request
        target = self._parts_target
        branch = self._agree_on_branch()
        self.branch = branch.start
        key = LocalKey(request.step, branch.number, request.save_id, place.group.count)
        self.key = key
        folder = place.folders.open(branch.run)
        self.folder = folder
        self._make_room(folder, branch)
        target = replace(target, storage=folder.storage, folder=key.folder)
        self._snapshots = SnapshotWork(request, target, place.options)
        part = self._write_part(key, folder, self._snapshots)
        for owner in place.meeting.copies_from:
            copied = place.copier.copy(owner, key, folder, target)
            place.serve(copied, folder)
            self.copied_bytes += sum(copied.files.values())
        return part

    def _agree_on_branch(self) -> Branch:
        """Returns the branch of this save, once its file is durable: see `Lineage`."""

        def begin() -> dict[str, Any]:
            end_s = self._parts_target.end_s
            branch = self._place.lineage.current(self._request.key, self._request.place, end_s)
            assert branch is not None
            return asdict(branch)

        name = f"{self._parts_target.messages}/begin"
        fields = ask_primary(
            self._place.group,
            name,
            begin,
            self._place.local.timeout_s,
            question=self._request.save_id,
        )
        return Branch(**fields)

    def _write_part(self, key: LocalKey, folder: HostFolder, work: SnapshotWork) -> Part:
        request = self._request
        items = work.write()
        head = None
        if self._place.group.index == 0:
            trees = {name: tree_text(plan) for name, plan in work.plans().items()}
            head = StepHead(
                trees,
                request.started_s,
                time.time(),
                metrics=request.metrics,
                metadata=request.metadata,
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
        need = self._request.own_bytes * (1 + others)
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
        """Returns the record that a restore would build: a step without one is no step."""
        assert self._snapshots is not None
        return self._snapshots.build(reports)

    def check(self, record: bytes) -> None:
        """Reads what `build` has built as every reader will."""
        assert self._snapshots is not None
        self._snapshots.check(record)

    def plans(self) -> Mapping[str, Plan]:
        """Returns the plans of the trees."""
        return {item: plan for item, (plan, _) in self._request.trees.items()}

    def replicas(self) -> Mapping[str, ReplicaSums]:
        """Returns the sums of the trees' replicas, by item."""
        return self._request.replicas

    def own_files(self) -> list[str]:
        """Returns the files that this process writes, by names relative to the step's folder."""
        return [] if self._snapshots is None else self._snapshots.own_files()

    def steps_crc(self) -> int:
        """Returns 0: which local steps there are is what a survey finds out."""
        return 0

    def superfluous(self, *, list_steps: bool) -> Superfluous:
        """Returns nothing: each process knows what it lets go."""
        return Superfluous()

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
                more_files = [f"{key.folder}/{name}" for name in self.own_files()]
            self.folder.let_go(key, more_files)
        if result.error is None and self._known is not None and self._place.meeting.is_lister:
            self._place.withdraw(self.folder.prune(self.key.branch, self._place.writer_id, stay))

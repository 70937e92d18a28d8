"""The local tier of a manager: saves into the memory or onto the disks of the hosts, copies at
peers, and restores from whoever is there.

A local save is a lane of its own beside the durable one: the primary begins it, each process writes
its part and then pulls those of peers, all report, and the primary says how it ended. Nothing is
made durable, and no word of it is needed later: what comes back is decided from the parts that are
found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast.multihost import Group
from holdfast.multihost.group.runtime import tls_files

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import SaveResult, drive, local_saves_to_delete, save_locally
from ..errors import (
    CheckpointError,
    CommitUnknown,
    Corrupt,
    StepNotFound,
    failure_of,
    naming_path,
)
from ..format.limits import check_step
from ..format.record import Record
from ..layouts.holdfast import HoldfastCheckpoint
from ..layouts.inspection import Structure, structure_of
from ..options import Local, Options
from ..saving.async_saver import AsyncSaver, SaveHandle
from ..saving.commit import EffectPerformer
from ..saving.scheduler import SaveScheduler
from ..saving.stager import SaveOrder, SaveRequest, SaveStager
from ..steps.lineage import Branch, Lineage, NoLineage, read_branches, run_of
from ..steps.root_report import HostCopies
from ..storage.base import Storage
from ..storage.path import StorePath
from .host_folder import HostFolder, HostStorage
from .inventory import FoundStep, Inventory, survey
from .local_save import HostPlace, LocalSave
from .meeting import meet
from .part_copier import PartCopier
from .parts import LocalKey, StepHead
from .peer_storage import PeerStorage
from .peer_tls import PeerTls
from .step_reader import StepReader

_log = logging.getLogger(__name__)
_COUNTS = (
    "saves",
    "saves_failed",
    "save_s",
    "save_bytes",
    "copied_bytes",
    "restores",
    "restores_failed",
)
T = TypeVar("T")


class LocalTier:
    """The local tier of one manager on one process. In a group every process calls the same, in the
    same order.

    Methods are for the manager's thread; saves run on a thread of their own. `close()` waits for
    the save in flight.
    """

    def __init__(
        self,
        local: Local,
        storage: Storage,
        group: Group,
        options: Options,
        writer_id: str,
        lineage: Lineage | NoLineage,
    ) -> None:
        path = Path(os.path.abspath(os.fspath(local.path)))
        self.storage = HostStorage(path)
        self.options = replace(
            options, progress=None, check_free_space=False, save_timeout_s=local.timeout_s
        )
        self._local = local
        self._root = storage
        self._root_timeout_s = options.save_timeout_s
        self._group = group
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._counter = 0
        self._folder: HostFolder | None = None
        self._found: list[FoundStep] = []  # what may come back, best first
        self._passed_over: set[LocalKey] = set()
        # from a save whose outcome was not heard until the next survey
        self._is_unsure = False
        self._stager = SaveStager(self.storage, group, self.options)
        files = tls_files()
        tls = None if files is None else PeerTls(*files)
        messages = f"checkpoint/{writer_id}/local"
        self._meeting = meet(local, path, group, f"{messages}/meet", tls)
        self._off = self._meeting.why_off
        self._place = HostPlace(
            local=local,
            path=path,
            storage=self.storage,
            group=group,
            options=self.options,
            meeting=self._meeting,
            copier=PartCopier(local, self._meeting),
            lineage=lineage,
            writer_id=writer_id,
            open_folder=self._open_folder,
        )
        self._reader = StepReader(group, self._meeting, self._run_folder, local.timeout_s)
        self._saver = AsyncSaver(self)
        self._scheduler: SaveScheduler | None = None
        try:
            self.survey()
            self._check_usable()
        except BaseException:
            self.close(0.0)
            raise
        self._scheduler = SaveScheduler(local.save_policy, group, f"{messages}/soon", skips=True)

    def _check_usable(self) -> None:
        if not self._off:
            return
        root = self._root.root
        if self._local.strict:
            raise CheckpointError(
                f"the local tier of {root} cannot be used: {self._off}", path=str(self._place.path)
            )
        if self._group.index == 0:
            _log.warning("the local tier of %s is off: %s", root, self._off)

    # --- what is there

    def survey(self) -> None:
        """Finds out which local steps may come back, from all that is there now; every process
        calls it. Blocks.
        """
        timeout_s = self.options.restore_timeout_s
        self._saver.join(timeout_s)
        self._survey(f"{self._place.messages}/survey", timeout_s)

    def _survey(self, name: str, timeout_s: float) -> None:
        fields = ask_primary(self._group, f"{name}/branches", self._read_branches, timeout_s)
        branches = [Branch(**each) for each in fields]
        own = Inventory(error=self._off or self._meeting.own_error)
        if not own.error:
            own = self._list(run_of(branches))
        verdict = survey(self._group, name, own, branches, timeout_s)
        with self._lock:
            self._off = self._off or verdict.why_off
            self._found = list(verdict.steps)
            self._is_unsure = False

    def _read_branches(self) -> list[dict[str, Any]]:
        with naming_path(self._root.root):
            return [asdict(branch) for branch in read_branches(self._root)]

    def _list(self, run: str) -> Inventory:
        """Returns what this process lists of its folder, and serves it."""
        if not run:
            return Inventory()
        folder = self._open_folder(run)
        if not self._meeting.is_lister:
            return Inventory()
        try:
            parts = folder.scan()
        except OSError as error:
            _log.warning("%s cannot be listed, and counts as empty: %s", folder.path, error)
            return Inventory()
        for part in parts:
            self._place.serve(part, folder)
        return Inventory([part.summary() for part in parts])

    def _open_folder(self, run: str) -> HostFolder:
        if self._folder is None or self._folder.run != run:
            self._folder = HostFolder(self._place.path, run, syncs=self._local.sync)
        return self._folder

    def _run_folder(self) -> HostFolder:
        assert self._folder is not None
        return self._folder

    def found(self) -> list[LocalKey]:
        """Returns the local steps that may come back, best first, but for those that did not
        restore.
        """
        return [step.key for step in self._restorable()]

    def _restorable(self) -> list[FoundStep]:
        with self._lock:
            return [step for step in self._found if step.key not in self._passed_over]

    def steps(self) -> list[int]:
        """Returns the local steps that may come back, ascending."""
        return sorted({key.step for key in self.found()})

    def copies(self) -> dict[int, HostCopies]:
        """Returns where the parts of each of these steps are, as of the last survey or save."""
        hosts = self._meeting.hosts
        return {
            step.key.step: HostCopies(step.survives(hosts), step.holders)
            for step in reversed(self._restorable())
        }

    def pass_over(self, key: LocalKey) -> None:
        """Notes that a local step could not be restored."""
        self._passed_over.add(key)
        self._count(restores_failed=1)

    def roll_back(self, step: int, begin: Callable[[], None]) -> None:
        """Lets no local step from `step` on come back: `begin` has the root say so, at the primary.

        Every process calls it. Blocks. Raises, on every process, what `begin` raises.
        """
        name = f"{self._place.messages}/delete"
        ask_primary(self._group, name, begin, self._root_timeout_s)
        with self._lock:
            self._found = [found for found in self._found if found.key.step < step]

    # --- saving

    def wants(self, step: int) -> bool:
        """Says whether `save` is to be called for a step; alike on every process. A lane that is
        busy skips.
        """
        if self._scheduler is None or (self._off and self._group.count == 1):
            return False
        return bool(self._scheduler.reason(step, busy=self._saver.busy() or bool(self._off)))

    def started(self, step: int) -> None:
        """Notes that a step is being saved, here or in the store: a preemption, for one, is
        answered with it.
        """
        if self._scheduler is not None:
            self._scheduler.started(step)

    def save(self, order: SaveOrder) -> SaveHandle:
        """Starts a local save. Returns when the caller may donate or overwrite its arrays. Raises
        as staging does.
        """
        self._saver.join()
        self._counter += 1
        # The durable lane counts from 1: no two saves of a writer have one id.
        save_id = f"{self._place.writer_id}{1 << 31 | self._counter:08x}"
        request = SaveRequest(self._counter, check_step(order.step), save_id)
        self.started(order.step)
        with self._saver.preparing(request, self._group):
            request = self._stager.stage(request, order)
        handle = self._saver.start(request)
        self._saver.wait_for_snapshots()
        return handle

    def run(self, request: SaveRequest) -> SaveResult:
        """Does a whole local save, on the saving thread. Blocks for its time; a failure is in the
        result, logged and counted.
        """
        try:
            result = self._save_together(request)
        except Exception as error:
            result = SaveResult(request.key, failure_of(error, request.step, self._group.index))
        finally:
            request.release()
        if result.error is None:
            save_s = time.monotonic() - request.began
            self._count(saves=1, save_s=save_s, save_bytes=request.own_bytes)
        else:
            self._count(saves_failed=1)
            _log.warning(
                "the local save of step %d failed; durable saves go on: %s",
                request.step,
                result.error,
            )
        return result

    def _save_together(self, request: SaveRequest) -> SaveResult:
        group = self._group
        save = LocalSave(self._place, request, None if self._is_unsure else self.found())
        performer = EffectPerformer(save.target, save)
        saving = save_locally(
            request.key, group.index, range(group.count), is_unsure=self._is_unsure
        )
        result = drive(saving, performer.perform)
        performer.add_cause(result.error)
        self._count(copied_bytes=save.copied_bytes)
        self._ended(save, result)
        if result.survey:
            self._survey_after(request)
        return result

    def _ended(self, save: LocalSave, result: SaveResult) -> None:
        """Knows the new step, and lets go what the outcome makes deletable."""
        with self._lock:
            self._off = self._off or result.lane_off
            # What was not heard is neither yes nor no: until a survey this process deletes nothing.
            self._is_unsure = self._is_unsure or isinstance(result.error, CommitUnknown)
            if save.key is None or save.folder is None:
                return
            writer_id = self._place.writer_id
            known = [step for step in self._found if step.key.save_id.startswith(writer_id)]
            goes = local_saves_to_delete(
                save.key,
                result,
                known=[step.key for step in known],
                written=save.folder.saves(),
                keep=self._local.keep,
                is_unsure=self._is_unsure,
            )
            if result.error is None:
                new = FoundStep(save.key, [], self._meeting.holders())
                self._found = [new, *known][: self._local.keep]
        try:
            save.delete(goes, result)
        except OSError as error:  # it is tried again after the next save
            _log.warning("local steps in %s could not be deleted yet: %s", save.folder.path, error)

    def _survey_after(self, request: SaveRequest) -> None:
        """Surveys on the saving thread, since some process does not know what there is.

        Until then that process keeps all that it has: without a survey its memory would fill up.
        """
        try:
            # A name of its own: a process that did not hear of this survey is in step at the next.
            self._survey(f"{self._place.messages}/{request.save_id}", self._local.timeout_s)
        except Exception as error:
            _log.warning("no survey after the local save of step %d: %s", request.step, error)

    # --- restoring

    def open_step(self, key: LocalKey) -> tuple[PeerStorage, Record]:
        """Returns a local step to read from, whoever has it; every process calls it. Blocks. Raises
        CheckpointError, on every process.
        """
        step = next(step for step in self._found if step.key == key)
        name = f"{self._place.messages}/record"
        return self._reader.open(step, name, self.options.restore_timeout_s)

    def head(self, step: int) -> StepHead:
        """Returns metrics and metadata of a local step. Raises StepNotFound, Corrupt."""
        found = next((found for found in self._found if found.key.step == step), None)
        if found is None:
            raise StepNotFound(f"there is no local step {step}", step=step)
        return self._reader.head(found)

    def structure(self, step: int) -> Structure:
        """Returns what a local step holds; every process calls it. Blocks. Raises StepNotFound,
        CheckpointError, on every process.
        """
        self.survey()
        key = next((key for key in self.found() if key.step == step), None)
        if key is None:
            raise StepNotFound(f"the hosts have no step {step} any more", step=step)
        storage, _ = self.open_step(key)
        with contextlib.closing(storage):
            return structure_of(HoldfastCheckpoint(StorePath(storage, key.folder)))

    def restore(self, storage: PeerStorage, restore: Callable[[], T]) -> T:
        """Returns what `restore` returns, which reads from `storage`; where a copy is damaged, it
        is tried again with the next.
        """
        try:
            while True:
                try:
                    value = restore()
                except Corrupt as error:
                    if not storage.pass_over(error.file):
                        raise
                    _log.warning("another copy is read instead: %s", error)
                else:
                    self._count(restores=1)
                    return value
        finally:
            storage.close()

    # --- the end

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def statistics(self) -> dict[str, Any]:
        """Returns what the tier has done, in JSON types: `local_saves`, `local_saves_failed`, ...,
        and why it is `local_off`.

        `local_survives` is how many hosts may be lost before the newest local step is.
        """
        with self._lock:
            counts = {
                f"local_{name}": amount if name.endswith("_s") else int(amount)
                for name, amount in self._counts.items()
            }
            newest = self._found[0] if self._found else None
        survives = 0 if newest is None else newest.survives(self._meeting.hosts)
        return counts | {"local_survives": survives, "local_off": self._off}

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the local save in flight. Raises TimeoutError after `timeout_s`."""
        self._saver.join(timeout_s)

    def raise_error(self) -> None:
        """Raises the error of a local save that failed, once, if the tier is strict."""
        failed = self._saver.take_error()
        if failed is not None and self._local.strict:
            raise failed

    def close(self, timeout_s: float) -> None:
        """Waits for the save in flight and ends the part server; what was saved stays on the hosts.
        Idempotent.
        """
        with contextlib.suppress(TimeoutError):
            self._saver.join(timeout_s)
        self._saver.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._meeting.close()
        if self._folder is not None:
            self._folder.close()

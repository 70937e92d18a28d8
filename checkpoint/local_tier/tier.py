"""The local tier of a manager: saves onto the hosts, copies at peers, and restores from both.

A local save is a lane of its own beside the durable one: the primary begins it, each process writes
its part and then pulls those of peers, all report, and the primary says how it ended. Nothing is
made durable, and no word of it is needed later: what comes back is decided from the parts that are
found.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast.coordination import HoldfastError
from holdfast.multihost.group.runtime import tls_files

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import BranchStart, SaveKey, SaveResult
from ..errors import (
    CheckpointError,
    SaveCancelled,
    StepNotFound,
    failure_of,
)
from ..format.limits import check_step
from ..format.record import Record
from ..layouts.holdfast import HoldfastCheckpoint
from ..layouts.inspection import Structure, structure_of
from ..options import Local
from ..peers.peer_tls import PeerTls
from ..saving.async_saver import AsyncSaver, SaveHandle
from ..saving.stager import OneSave, SaveOrder, SaveStager
from ..scheduling.scheduler import SaveScheduler
from ..steps.lineage import Lineage, NoLineage, Position
from ..steps.opening import OpenRoot
from ..steps.root_report import HostCopies
from ..storage.path import StorePath
from .host_folder import HostStorage, RunFolder
from .local_save import HostPlace
from .local_steps import LocalSteps
from .meeting import meet
from .part_copier import PartCopier
from .parts import LocalKey, StepHead
from .peer_storage import PeerStorage

_log = logging.getLogger(__name__)
_COUNTS = (
    "saves",
    "saves_failed",
    "save_s",
    "save_bytes",
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

    def __init__(self, local: Local, root: OpenRoot, lineage: Lineage | NoLineage) -> None:
        path = Path(local.path)
        group = root.group
        self.storage = HostStorage(path)
        # The store's disk is not this host's, and a bar for each local save would flicker.
        self.options = replace(
            root.options, progress=None, check_free_space=False, save_timeout_s=local.timeout_s
        )
        self._hosts = replace(root, storage=self.storage, options=self.options)
        self._local = local
        self._root = root
        self._group = group
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._counter = 0
        self._stager = SaveStager(self._hosts)
        messages = f"{root.messages}/local"
        files = tls_files()
        tls = None if files is None else PeerTls(*files)
        self._meeting = meet(local, path, group, f"{messages}/meet", tls)
        self._place = HostPlace(
            local=local,
            path=path,
            storage=self.storage,
            group=group,
            options=self.options,
            meeting=self._meeting,
            copier=PartCopier(local, self._meeting),
            lineage=lineage,
            writer_id=root.writer.id,
            folders=RunFolder(path, syncs=local.sync),
        )
        self._steps = LocalSteps(root.storage, self._place)
        self._saver = AsyncSaver(self)
        self._scheduler: SaveScheduler | None = None
        try:
            self.survey()
            self._check_usable()
        except BaseException:
            self.close(0.0)
            raise
        self._scheduler = SaveScheduler(
            local.save_policy, group, f"{messages}/soon", skips=True, heeds_notices=False
        )

    def _check_usable(self) -> None:
        off = self._steps.off
        if not off:
            return
        root = self._root.where
        if self._local.strict:
            message = f"the local tier of {root} cannot be used: {off}"
            raise CheckpointError(message, path=str(self._place.path))
        if self._group.index == 0:
            _log.warning("the local tier of %s is off: %s", root, off)

    # --- what is there

    def survey(self) -> None:
        """Finds out which local steps may come back; every process calls it. Blocks."""
        timeout_s = self.options.restore_timeout_s
        self._saver.join(timeout_s)
        self._steps.survey(f"{self._place.messages}/survey", timeout_s)

    def found(self) -> list[LocalKey]:
        """Returns the local steps that may come back, best first."""
        return [step.key for step in self._steps.restorable()]

    def steps(self) -> list[int]:
        """Returns the local steps that may come back, ascending."""
        return sorted({key.step for key in self.found()})

    def copies(self) -> dict[int, HostCopies]:
        """Returns where the parts of each of these steps are, as of the last survey or save."""
        return self._steps.copies()

    def pass_over(self, key: LocalKey) -> None:
        """Notes that a local step could not be restored."""
        self._steps.pass_over(key)
        self._count(restores_failed=1)

    def roll_back(self, step: int, begin: Callable[[], None]) -> None:
        """Lets no local step from `step` on come back: `begin` has the root say so, at the primary.

        Every process calls it. Blocks. Raises, on every process, what `begin` raises.
        """
        name = f"{self._place.messages}/delete"
        ask_primary(self._group, name, begin, self._root.options.save_timeout_s, question=str(step))
        # Only now: until the root says so, a crash would bring these steps back.
        self._steps.forget_from(step)

    def leave(self, branch: BranchStart, step: int) -> None:
        """Lists no local step any more that the branch of a durable save has left, and none that
        it has replaced; on the thread of that save.
        """
        self._steps.leave(branch)
        self._steps.replace(step)

    # --- saving

    def wants(self, step: int) -> bool:
        """Says whether `save` is to be called for a step; alike on every process."""
        if self._scheduler is None or (self._steps.off and self._group.count == 1):
            return False
        # A tier that is off counts as busy: the processes of a group may learn of it at different
        # steps, and all have to ask.
        busy = self._saver.busy() or bool(self._steps.off)
        return bool(self._scheduler.reason(step, busy=busy))

    def started(self, step: int) -> None:
        """Notes that a step is being saved, here or in the store."""
        if self._scheduler is not None:
            self._scheduler.started(step)

    def save(self, order: SaveOrder, find_place: Callable[[int], Position]) -> SaveHandle:
        """Starts a local save; returns when the caller may donate or overwrite its arrays.

        `find_place` says where its step stands among the others, and may refuse it. Raises the
        error of the one before, if the tier is strict, once this save has begun.
        """
        called_s = time.monotonic()
        self._counter += 1
        # The durable lane counts from 1: no two saves of a writer have one id.
        save_id = f"{self._place.writer_id}{1 << 31 | self._counter:08x}"
        key = SaveKey(save_id, self._counter, check_step(order.step))
        save = OneSave(root=self._hosts, key=key, is_local=True)
        self._saver.join_before(order, save.waits)
        earlier = self._take_error()
        self.started(order.step)
        try:
            with self._saver.preparing(save, self._group):
                save.stand(find_place(save.step), may_miss=False)
                self._stager.stage(save, order)
        except BaseException as error:
            if earlier is not None:
                error.add_note(f"besides, an earlier save failed: {earlier}")
            raise
        handle = self._saver.begin(save)
        if self._scheduler is not None:
            note_saved = self._scheduler.note_saved
            handle.on_commit(lambda _: note_saved(time.monotonic() - save.began))
            blocked_s = time.monotonic() - called_s - save.waits.seconds
            self._scheduler.note_blocked(max(0.0, blocked_s))
        if earlier is not None:
            earlier.add_note(f"the save of step {order.step} was begun nevertheless")
            raise earlier
        return handle

    def run(self, save: OneSave) -> SaveResult:
        """Does a whole local save, on the saving thread; a failure is in the result, and logged."""
        try:
            result = self._steps.save(save)
        except Exception as error:
            result = SaveResult(save.key, failure_of(error, save.step, self._group.index))
        finally:
            save.release()
        if result.error is None:
            save_s = time.monotonic() - save.began
            self._count(saves=1, save_s=save_s, save_bytes=save.own_bytes)
        elif not isinstance(result.error, SaveCancelled):
            self._count(saves_failed=1)
            _log.warning(
                "the local save of step %d failed; durable saves go on: %s",
                save.step,
                result.error,
            )
        return result

    # --- restoring

    def open_step(self, key: LocalKey, question: str) -> tuple[PeerStorage, Record]:
        """Returns a local step to read from; every process calls it, with the same `question`.
        Blocks.
        """
        return self._steps.open(key, question)

    def head(self, step: int) -> StepHead:
        """Returns metrics and metadata of a local step. Raises StepNotFound, Corrupt."""
        return self._steps.head(step)

    def structure(self, step: int) -> Structure:
        """Returns what a local step holds; every process calls it. Blocks.

        Raises StepNotFound, CheckpointError, on every process.
        """
        self.survey()
        key = next((key for key in self.found() if key.step == step), None)
        if key is None:
            raise StepNotFound(f"the hosts have no step {step} any more", step=step)
        storage, _ = self.open_step(key, key.folder)
        with contextlib.closing(storage):
            return structure_of(HoldfastCheckpoint(StorePath(storage, key.folder)))

    def restore(
        self,
        storage: PeerStorage,
        restores: Mapping[str, Callable[[], T]],
    ) -> dict[str, T]:
        """Returns by item what its call in `restores` returns, which reads from `storage`."""
        with contextlib.closing(storage):
            values = {item: restore() for item, restore in restores.items()}
        self._count(restores=1)
        return values

    # --- the end

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def statistics(self) -> dict[str, Any]:
        """Returns what the tier has done, in JSON types, and why it is `local_off`.

        `local_survives` is how many hosts may be lost before the newest local step is.
        """
        with self._lock:
            counted = self._counts | {"copied_bytes": float(self._steps.copied_bytes)}
        counts = {
            f"local_{name}": amount if name.endswith("_s") else int(amount)
            for name, amount in counted.items()
        }
        survives = self._steps.newest_survives()
        return counts | {"local_survives": survives, "local_off": self._steps.off}

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the local save in flight. Raises TimeoutError after `timeout_s`."""
        self._saver.join(timeout_s)

    def raise_error(self) -> None:
        """Raises the error of a local save that failed, once, if the tier is strict."""
        failed = self._take_error()
        if failed is not None:
            raise failed

    def _take_error(self) -> HoldfastError | None:
        failed = self._saver.take_error()
        return failed if self._local.strict else None

    def close(self, timeout_s: float) -> None:
        """Waits for the save in flight, and ends the part server. Idempotent."""
        with contextlib.suppress(TimeoutError):
            self._saver.join(timeout_s)
        self._saver.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._meeting.close()
        self._place.folders.close()

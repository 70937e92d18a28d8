"""The local steps of a root as one process knows them: surveyed, saved, and opened to restore.

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
from collections.abc import Callable, Iterator
from typing import Any, Self

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import (
    BranchStart,
    SaveKey,
    SaveResult,
    local_saves_to_delete,
)
from ..errors import (
    CheckpointError,
    SaveCancelled,
    StepGone,
    StepNotFound,
    error_text,
    is_shortage,
    naming_path,
)
from ..layouts.holdfast import HoldfastCheckpoint
from ..layouts.inspection import Structure, structure_of
from ..options import Local
from ..saving.async_saver import AsyncSaver
from ..saving.commit import broken_off, run_protocol
from ..saving.stager import OneSave
from ..steps.lineage import Branch, Lineage, read_branches, run_of
from ..steps.opening import OpenRoot
from ..steps.root_report import HostCopies
from ..storage.base import Storage
from .host_folder import HostFolder
from .host_place import HostPlace
from .inventory import FoundStep, Inventory, survey
from .local_save import LocalSave
from .parts import LocalKey, StepHead, has_left
from .step_reading import open_step, read_head

_log = logging.getLogger(__name__)
_COUNTS = (
    "saves",
    "saves_failed",
    "save_s",
    "save_bytes",
    "restores",
    "restores_failed",
    "copied_bytes",
)


class LocalSteps:
    """The local steps that may come back, best first, and who saves them. In a group every process
    calls the same, in the same order.

    `off` is why no local saves are made, or "". `is_unsure`: see `agreement.save_protocol`. Methods
    are for the manager's thread; saves run on the thread of `saver`. `close()` lets it end after
    the save in flight.
    """

    history = None  # local saves link nothing

    def __init__(self, store: Storage, place: HostPlace) -> None:
        self.root = place.root
        self._store = store
        self._place = place
        self._lock = threading.Lock()
        self._found: list[FoundStep] = []  # with reports at the primary alone
        self._passed_over: set[LocalKey] = set()
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self.off = place.meeting.why_off
        self.is_unsure = False  # from an outcome that was not heard until the next survey
        self.saver = AsyncSaver(self)

    @classmethod
    def open(cls, local: Local, root: OpenRoot, lineage: Lineage | None) -> Self:
        """Finds the local steps of a root; every process calls it. Blocks.

        Raises CheckpointError where the tier is strict and cannot be used.
        """
        steps = cls(root.storage, HostPlace.open(local, root, lineage))
        try:
            steps.survey()
            steps._check_usable()
        except BaseException:
            steps.close()
            raise
        return steps

    def _check_usable(self) -> None:
        if not self.off:
            return
        where = self._store.root
        if self.is_strict:
            raise CheckpointError(
                f"the local tier of {where} cannot be used: {self.off}", path=self.root.where
            )
        if self.root.group.index == 0:
            _log.warning("the local tier of %s is off: %s", where, self.off)

    # --- what is there

    def survey(self) -> None:
        """Finds out which local steps may come back; every process calls it. Blocks, first for the
        save in flight.
        """
        timeout_s = self.root.options.restore_timeout_s
        self.saver.join(timeout_s)
        self._survey(f"{self._place.messages}/survey", timeout_s)

    def _survey(self, name: str, timeout_s: float) -> None:
        """Finds out what there is, by messages of that `name`."""
        group = self.root.group
        told = ask_primary(group, f"{name}/branches", self._read_branches, timeout_s)
        branches = [Branch(**fields) for fields in told]
        own = Inventory(error=self.off) if self.off else self._list(run_of(branches))
        verdict = survey(group, name, own, branches, timeout_s)
        with self._lock:
            self.off = self.off or verdict.why_off
            self._found = list(verdict.steps)
            self.is_unsure = False

    def _read_branches(self) -> list[Branch]:
        with naming_path(self._store.root):
            return read_branches(self._store)

    def _list(self, run: str) -> Inventory:
        """Returns what this process lists of its folder, and serves it."""
        if not run:
            return Inventory()
        place = self._place
        process = f"process {self.root.group.index}"
        try:
            folder = place.folders.open(run)
            parts = folder.scan() if place.meeting.is_lister else []
        except CheckpointError as error:
            return Inventory(error=f"{process}: {error_text(error)}")
        except (OSError, MemoryError) as error:
            if is_shortage(error):
                why = f"{process} cannot list its local steps: {error_text(error)}"
                return Inventory(unseen=why)
            _log.warning("%s cannot be listed, and counts as empty: %s", self.root.where, error)
            return Inventory()
        for part in parts:
            place.serve(part, folder)
        return Inventory([part.summary() for part in parts])

    def found(self) -> list[LocalKey]:
        """Returns the local steps that may come back, best first; none that did not restore."""
        return [step.key for step in self._restorable()]

    def _restorable(self) -> list[FoundStep]:
        with self._lock:
            return [step for step in self._found if step.key not in self._passed_over]

    def steps(self) -> list[int]:
        """Returns the local steps that may come back, ascending."""
        return sorted({key.step for key in self.found()})

    def copies(self) -> dict[int, HostCopies]:
        """Returns where the parts of each of these steps are, as of the last survey or save."""
        hosts = self._place.meeting.hosts
        return {
            step.key.step: HostCopies(step.survives(hosts), step.holders)
            for step in reversed(self._restorable())
        }

    def pass_over(self, key: LocalKey) -> None:
        """Notes that a local step could not be restored."""
        with self._lock:
            self._passed_over.add(key)
        self._count(restores_failed=1)

    def leave(self, branch: BranchStart, step: int | None = None) -> None:
        """Lists no local step any more that a branch has left, and lets none of the number `step`
        come back: the store has another one by now. On any thread.
        """
        with self._lock:
            self._found = [found for found in self._found if not has_left(branch, found.key)]
            self._passed_over.update(found.key for found in self._found if found.key.step == step)

    def roll_back(self, step: int, begin: Callable[[], None], timeout_s: float) -> None:
        """Lets no local step from `step` on come back: `begin` has the root say so, at the primary.

        Every process calls it. Blocks. Raises, on every process, what `begin` raises.
        """
        ask_primary(self.root.group, f"{self._place.messages}/delete/{step}", begin, timeout_s)
        # Only now: until the root says so, a crash would bring these steps back.
        with self._lock:
            self._found = [found for found in self._found if found.key.step < step]

    # --- saving

    @property
    def is_strict(self) -> bool:
        """Whether a local save that fails is an error of the program's."""
        return self._place.local.strict

    def new_save(self, counter: int, step: int) -> OneSave:
        """Returns a local save of a step, with nothing in it."""
        # The durable lane counts from 1: no two saves of a writer have one id.
        save_id = f"{self.root.writer.id}{1 << 31 | counter:08x}"
        return OneSave(root=self.root, key=SaveKey(save_id, counter, step), is_local=True)

    def run(self, save: OneSave) -> SaveResult:
        """Does a whole local save, on the saving thread; a failure is in the result, and logged."""
        try:
            result = self.save(save)
        except Exception as error:
            result = broken_off(save, error)
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

    def save(self, save: OneSave) -> SaveResult:
        """Does a local save with all processes. Blocks for its time; a failure is in the result."""
        is_unsure = self.is_unsure
        work = LocalSave(self._place, save, None if is_unsure else self.found())
        result = run_protocol(save, work, is_unsure=is_unsure)
        self._take_note(work, result)
        if work.branch is not None:
            # Its file is durable, whatever became of the save.
            self.leave(work.branch)
        self._let_go(work, result)
        if result.survey:
            self._survey_after(save)
        return result

    def _let_go(self, work: LocalSave, result: SaveResult) -> None:
        """Deletes the local saves that go at the end of one."""
        if work.key is None:
            return
        if work.folder is None:
            self._place.withdraw([work.key.folder])
            return
        try:
            goes = self._ended(work.key, work.folder, result)
            work.delete(goes, self.found(), result)
        except OSError as error:  # it is tried again after the next save
            _log.warning("local steps in %s could not be deleted yet: %s", work.folder.path, error)

    def _survey_after(self, save: OneSave) -> None:
        """Surveys on the saving thread, since some process does not know what there is.

        Until then that process keeps all that it has: without a survey its memory would fill up.
        """
        # A name of its own: a process that did not hear of this survey is in step at the next.
        name = f"{self._place.messages}/{save.key.save_id}"
        try:
            self._survey(name, self._place.local.timeout_s)
        except Exception as error:
            _log.warning("no survey after the local save of step %d: %s", save.step, error)

    def _ended(self, key: LocalKey, folder: HostFolder, result: SaveResult) -> list[LocalKey]:
        """Knows a save that has ended; returns the local saves of this process that go now."""
        keep = self._place.local.keep
        known = self._restorable()
        if result.error is None:
            with self._lock:
                self._found = [FoundStep(key, [], self._place.meeting.holders()), *known][:keep]
        return local_saves_to_delete(
            key,
            result,
            known=[step.key for step in known],
            written=folder.saves(),
            keep=keep,
            is_unsure=self.is_unsure,
        )

    def _take_note(self, work: LocalSave, result: SaveResult) -> None:
        """Notes why the tier ends, and that an outcome was not heard."""
        self._count(copied_bytes=work.copied_bytes)
        with self._lock:
            self.off = self.off or result.lane_off
            # What was not heard is neither yes nor no: a survey looks.
            self.is_unsure = self.is_unsure or result.is_unclear

    # --- reading

    @contextlib.contextmanager
    def opened(self, key: LocalKey, question: str) -> Iterator[HoldfastCheckpoint]:
        """Opens a local step to read from, see `open_step`. What is read within counts as a
        restore. Raises StepGone where a durable save has replaced or left the step meanwhile.
        """
        with self._lock:
            step = next((step for step in self._found if step.key == key), None)
        if step is None:
            raise StepGone(
                f"local step {key.step} is no longer one of the root's: a durable save has replaced"
                " it, or left it behind; restore again",
                step=key.step,
            )
        with open_step(self._place, step, question) as checkpoint:
            yield checkpoint
        self._count(restores=1)

    def head(self, step: int) -> StepHead:
        """Returns metrics and metadata of a local step. Raises StepNotFound, Corrupt."""
        return read_head(self._place, self._step(step))

    def structure(self, step: int) -> Structure:
        """Returns what a local step holds; every process calls it. Blocks.

        Raises StepNotFound, CheckpointError, on every process.
        """
        self.survey()
        found = self._step(step)
        with open_step(self._place, found, found.key.folder) as checkpoint:
            return structure_of(checkpoint)

    def _step(self, step: int) -> FoundStep:
        found = next((found for found in self._restorable() if found.key.step == step), None)
        if found is None:
            raise StepNotFound(f"the hosts have no step {step} any more", step=step)
        return found

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
            newest = self._found[:1]
            counts = {
                f"local_{name}": amount if name.endswith("_s") else int(amount)
                for name, amount in self._counts.items()
            }
        hosts = self._place.meeting.hosts
        survives = sum(step.survives(hosts) for step in newest)
        return counts | {"local_survives": survives, "local_off": self.off}

    def close(self) -> None:
        """Ends the part server, and lets the saving thread end. Idempotent."""
        self.saver.close()
        self._place.close()

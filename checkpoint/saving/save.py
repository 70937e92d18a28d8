"""The save of a tree that is in memory, a manager's or a single one: what it writes, and what the
manager brings up to date after it.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from holdfast.coordination import HoldfastError

from ..agreement.misses import Misses
from ..agreement.save_protocol import (
    BranchStart,
    Prepared,
    SaveKey,
    SaveReport,
    SaveResult,
    Superfluous,
)
from ..errors import SaveCancelled
from ..format.item_report import ItemReport
from ..format.record import check_record, check_record_size
from ..format.step_folders import write_hint
from ..format.values import decode_value
from ..options import ProgressMeter, Statistics
from ..steps.background import BackgroundWorker
from ..steps.claims import writer_of
from ..steps.holds import letting_go
from ..steps.index import StepIndex, StepInfo
from ..steps.lineage import Lineage, StepOrder
from ..steps.opening import OpenRoot
from ..storage.base import Storage
from ..storage.local import fenced
from ..storage.retries import until
from .commit import SaveWork, broken_off, run_protocol
from .incremental import SaveHistory
from .item_files import Progress, report_json, write_files, write_json
from .pack_writer import write_snapshot
from .plan import Plan
from .plan_mismatch import check_json, check_own_names, check_shares
from .record_builder import Items, RecordHead, build_record, tree_text
from .snapshot import begin_copies
from .stager import OneSave

_log = logging.getLogger(__name__)
SPARE_BYTES = 1 << 20  # for headers, the record and folders, when free space is checked


class SnapshotWork(SaveWork):
    """Writes the snapshots and values of a save: the whole of a single one."""

    _history: SaveHistory | None = None
    _statistics: Statistics | None = None

    def __init__(self, save: OneSave) -> None:
        self._save = save
        self._process = save.group.index
        self._branch: BranchStart | None = None

    def write(self) -> Prepared:
        """Writes this process's share, durably; reports it."""
        save = self._save
        if save.broken is not None:
            raise save.broken
        self._check_space()
        begin_copies(save.trees.values())
        try:
            return Prepared(self._write_items(self._progress()))
        except FileNotFoundError as error:
            # Without its claim a sweep takes away what it is writing.
            if save.is_local or save.storage.list(save.claim):
                raise
            raise fenced(f"{save.root.where}/{save.claim}") from error

    def _write_items(self, progress: Progress) -> dict[str, ItemReport]:
        save = self._save
        process = self._process
        reports = {}
        for name, snapshot in save.trees.items():
            with save.item(name).synced_once() as place:
                reports[name] = write_snapshot(
                    snapshot,
                    place,
                    progress=progress,
                    history=self._history,
                    statistics=self._statistics,
                )
        for name, value in save.values.items():
            if value.per_process or process == 0:
                reports[name] = write_json(save.item(name), process, value.data)
            else:
                reports[name] = report_json(process, value.data)
        for name, staged in save.files.items():
            with save.item(name).synced_once() as place:
                reports[name] = write_files(place, process, staged, progress)
        return reports

    def _progress(self) -> Progress:
        """Returns what is called with the bytes of each piece that is out."""
        save = self._save
        listener = save.root.options.progress
        meter = None if listener is None else ProgressMeter(save.step, save.own_bytes, listener)

        def progress(nbytes: int) -> None:
            save.cancellation.check(save.step, self._process)
            if meter is not None:
                meter.add(nbytes)

        return progress

    def _check_space(self) -> None:
        """Refuses, at the primary and before a byte is written, what the disk has no room for."""
        root = self._save.root
        storage = root.storage
        if not root.options.check_free_space or self._process or storage.posix is None:
            return
        # What may be linked is known only when it is compared: the save may need almost nothing.
        may_link = self._history is not None and self._history.is_known
        need = SPARE_BYTES + (0 if may_link else self._save.total_bytes)
        free = shutil.disk_usage(storage.root).free
        if need > free:
            raise OSError(
                errno.ENOSPC,
                f"step {self._save.step} needs {need:,} bytes, {free:,} are free; delete old"
                " steps or keep fewer",
                storage.root,
            )

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record, at the primary. Raises SaveFailed where the reports do not fit."""
        save = self._save
        plans = save.plans
        items = {
            name: (plans.get(name), [report.items[name] for report in reports])
            for name in (*plans, *save.values, *save.files)
        }
        for name, (plan, shares) in items.items():
            self._check_shares(name, plan, shares)
        self._branch = self._current_branch()
        record = self._record(items)
        self._check(record, items)
        return record

    def _check_shares(self, name: str, plan: Plan | None, shares: Sequence[ItemReport]) -> None:
        """Raises SaveFailed where the shares of an item do not fit together."""
        if plan is not None:
            check_shares(name, tree_text(plan), shares)
        elif name in self._save.files:
            check_own_names(name, shares)
        elif not self._save.values[name].per_process:
            check_json(name, shares)

    def _current_branch(self) -> BranchStart | None:
        """Returns the branch of the root's history that the save belongs to."""
        return None

    def _record(self, items: Items) -> bytes:
        save = self._save
        return build_record(
            RecordHead(
                save.step,
                writer=save.key.save_id,
                processes=save.group.count,
                started_s=save.started_s,
                finished_s=time.time(),
                metrics=save.metrics,
                metadata=save.metadata,
                opening=None if self._branch is None else self._branch.number,
            ),
            items,
        )

    def _check(self, record: bytes, items: Items) -> None:
        """Reads the record as a reader will, without what was read at an earlier save.

        That is what a plan alone says (see check_plan), and a layout.
        """
        where = self._save.where
        check_record_size(record, where)
        without_plans = {name: (None, shares) for name, (_, shares) in items.items()}
        check_record(self._record(without_plans), where)
        for _, shares in items.values():
            for kind, text in (value for share in shares for value in share.values):
                decode_value(kind, text)


@dataclass(frozen=True, kw_only=True)
class RootState:
    """What one process knows of a root that it has open, and its worker there.

    `leave` takes the branch and the number of each step that is saved, where there is a local tier:
    see `LocalSteps.leave`.
    `report` tells those who watch how the root stands now: the primary does.
    `waiting` surrounds a wait for store or group: no watchdog takes it for a hang.
    `make_way` takes the store, the folder of each step before the primary writes there, and the
    claim: see `ForeignSteps.make_way`.
    """

    index: StepIndex
    order: StepOrder
    statistics: Statistics
    worker: BackgroundWorker
    lineage: Lineage | None  # that of the writing primary: nobody else begins branches
    misses: Misses
    report: Callable[[], None] = lambda: None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    leave: Callable[[BranchStart, int], None] | None = None
    make_way: Callable[[Storage, str, str], None] = lambda storage, folder, claim: None
    history: SaveHistory | None = None  # of incremental saves


class _StepWork(SnapshotWork):
    """Writes a step of a root, whose index says what the step makes superfluous."""

    def __init__(self, save: OneSave, state: RootState) -> None:
        super().__init__(save)
        self._state = state
        self._history = state.history
        self._statistics = state.statistics

    def write(self) -> Prepared:
        """Writes this process's share, durably; reports it. Raises StepExists too."""
        save = self._save
        if self._process == 0:
            self._state.make_way(save.storage, save.folder, save.claim)
        return replace(super().write(), steps=self._state.index.crc())

    def _current_branch(self) -> BranchStart | None:
        save = self._save
        assert self._state.lineage is not None
        branch = self._state.lineage.current(save.key, save.place, save.end_s)
        return None if branch is None else branch.start

    def committed(self, *, list_steps: bool) -> Superfluous:
        """Returns what the save makes superfluous, and has left behind, at the primary."""
        index = self._state.index
        list_steps |= index.leave_marked()
        deleted = self._delete_superfluous()
        steps = tuple(index.steps()) if list_steps else None
        left = None
        if list_steps or self._save.place.is_branch:
            left = tuple(sorted(index.left_behind() - {self._save.step}))
        return Superfluous(deleted, steps, left, self._branch)

    def _delete_superfluous(self) -> tuple[int, ...]:
        """Deletes what the keep policy lets go; returns what went. What stays, stays on all."""
        index = self._state.index
        save = self._save
        try:
            superfluous = index.superfluous(save.facts, end_s=save.end_s)
            with letting_go(save.storage, superfluous, writer_of(save.key.save_id)) as going:
                remaining = index.remove(going, end_s=save.end_s)
        except Exception as error:
            # The step is saved. What should go may go after the next save.
            _log.warning(
                "which steps to delete after step %d could not be decided: %s",
                save.step,
                error,
            )
            return ()
        return tuple(step for step in going if step not in remaining)


@dataclass(frozen=True)
class StepSaver:
    """Does the saves of a root's steps, and brings the root's state up to date after each."""

    root: OpenRoot
    state: RootState

    @property
    def history(self) -> SaveHistory | None:
        """The history of incremental saves."""
        return self.state.history

    def new_save(self, counter: int, step: int) -> OneSave:
        """Returns a save of a step, with nothing in it; its counter is the same on all
        processes.
        """
        root = self.root
        return OneSave(
            root=root,
            key=SaveKey(f"{root.writer.id}{counter:08x}", counter, step),
            folder=self.state.index.folder(step),
            may_miss=True,
            reports_step=True,
            worker=self.state.worker,
        )

    def run(self, save: OneSave) -> SaveResult:
        """Does the whole save. Blocks for its time and RESULT_WAIT_S at most.

        A failure is in the result. When it returns, the step is in the index, superfluous ones are
        not, and the statistics count it.
        """
        root = self.root
        state = self.state
        next_miss = state.misses.next(may_miss=save.may_miss)
        try:
            result = run_protocol(save, _StepWork(save, state), next_miss=next_miss)
        except Exception as error:
            result = broken_off(save, error)
        finally:
            save.release()
        incremental = False
        if state.history is not None:
            incremental = state.history.end(committed=result.error is None)
        if state.misses.note(result) and root.group.index == 0:
            root.group.report(saves_missed=result.missed)
        if result.is_there:
            state.index.learn(save.step)
        if result.error is not None:
            self._note_failure(result.error, missed=bool(result.missed))
            return result
        self._note_step(save, result, incremental=incremental)
        state.report()
        return result

    def _note_failure(self, error: HoldfastError, *, missed: bool) -> None:
        if isinstance(error, SaveCancelled):
            return
        group = self.root.group
        self.state.statistics.add(saves_failed=1, saves_missed=missed)
        trouble = str(error)
        if missed:
            trouble = f"{self.state.misses.text}; the next save tries again: {error}"
            _log.warning("a save failed, and training goes on: %s", trouble)
        # All processes have the same error: the one that failed reports it for all.
        if group.index == (getattr(error, "process", None) or 0):
            group.report(trouble=trouble)

    def _note_step(self, save: OneSave, result: SaveResult, *, incremental: bool) -> None:
        """Brings statistics, index and claim up to date after a commit."""
        state = self.state
        index = state.index
        took_s = time.monotonic() - save.began
        state.statistics.add(
            saves=1,
            save_s=took_s,
            save_bytes=save.total_bytes,
            replicas_differed=bool(result.drift),
        )
        after = result.after
        if after.steps is not None:
            index.adopt(after.steps)
        if after.left_behind is not None:
            index.adopt_left(after.left_behind)
        info = StepInfo(save.facts, save.total_bytes, incremental, time.time(), took_s)
        index.add(save.step, info)
        state.order.saved(save.place)
        if save.group.index:  # the primary has deleted them
            index.remove(after.superfluous)
        if after.branch is not None and state.leave is not None:
            state.leave(after.branch, save.step)
        if save.group.index == 0 and self.root.storage.posix is None:
            self._announce(save)

    def _announce(self, save: OneSave) -> None:
        """Has the worker tell readers of a bucket of the step, and renew the claim there."""
        root = self.root

        def announce() -> None:
            end_s = time.monotonic() + root.options.save_timeout_s
            write_hint(until(root.storage, end_s), save.step, save.key.save_id)
            # A claim that was not renewed for a day counts as dead, where a store has no locks.
            root.claims.until(end_s).take(root.writer)

        self.state.worker.put(f"announcing step {save.step}, and renewing the claim", announce)

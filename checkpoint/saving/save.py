"""The save of a tree that is in memory, a manager's or a single one: what it writes, and what the
manager brings up to date after it.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination import HoldfastError

from ..agreement.misses import Misses
from ..agreement.save_protocol import BranchStart, SaveReport, SaveResult, Superfluous
from ..errors import SaveCancelled, failure_of
from ..format.item_report import ItemReport, bin_name, json_name, pack_name
from ..format.record import check_record, check_record_size
from ..format.step_folders import write_hint
from ..format.values import decode_value
from ..options import Options, ProgressMeter, Statistics
from ..steps.background import BackgroundWorker
from ..steps.claims import FOLDER
from ..steps.index import SavedStep, StepIndex
from ..steps.lineage import Lineage, NoLineage, StepOrder
from ..steps.opening import OpenRoot
from ..steps.root_report import NoReporter, RootReporter
from ..storage.base import Storage
from ..storage.local import fenced
from ..storage.retries import until
from .commit import SaveTarget, run_protocol
from .incremental import NAMES, SaveHistory
from .item_files import ItemTarget, report_json, write_files, write_json
from .pack_writer import write_snapshot
from .plan import Plan
from .plan_mismatch import check_json, check_own_names, check_reports
from .record_builder import RecordHead, build_record
from .replicas import ReplicaSums
from .snapshot import begin_copies
from .stager import JsonValue, SaveRequest

_log = logging.getLogger(__name__)
# Saves take turns at this many names: a process that is late for one save never meets the others in
# the next.
MESSAGE_NAMES = 64
SPARE_BYTES = 1 << 20  # for headers, the record and folders, when free space is checked


class SnapshotWork:
    """Writes the snapshots and values of a request: the whole of a single save."""

    def __init__(
        self,
        request: SaveRequest,
        target: SaveTarget,
        options: Options,
        *,
        history: SaveHistory | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self._request = request
        self._target = target
        self._options = options
        self._history = history
        self._statistics = statistics
        self._process = target.group.index
        self._items: Mapping[str, tuple[Plan | None, list[ItemReport]]] = {}
        self._branch: BranchStart | None = None

    def write(self) -> Mapping[str, ItemReport]:
        """Writes this process's share, durably; reports it."""
        if self._request.broken is not None:
            raise self._request.broken
        self._check_space()
        begin_copies(snapshot for _, snapshot in self._request.trees.values())
        try:
            return self._write_items(self._progress())
        except FileNotFoundError as error:
            target = self._target
            # Without its claim a sweep takes away what it is writing.
            if target.timed_storage.list(target.claim):
                raise
            raise fenced(f"{target.storage.root}/{target.claim}") from error

    def _write_items(self, progress: Callable[[int], None]) -> dict[str, ItemReport]:
        request = self._request
        reports = {}
        for name, (_, snapshot) in request.trees.items():
            with self._place(name).synced_once() as place:
                reports[name] = write_snapshot(
                    snapshot,
                    place,
                    progress=progress,
                    history=self._history,
                    statistics=self._statistics,
                )
        for name, value in request.values.items():
            if self._writes(value):
                reports[name] = write_json(self._place(name), self._process, value.data)
            else:
                reports[name] = report_json(self._process, value.data)
        for name, staged in request.files.items():
            with self._place(name).synced_once() as place:
                reports[name] = write_files(place, self._process, staged, progress)
        return reports

    def _place(self, item: str) -> ItemTarget:
        target = self._target
        return ItemTarget(target.timed_storage, target.folder, item, self._request.save_id)

    def _writes(self, value: JsonValue) -> bool:
        return value.per_process or self._process == 0

    def _progress(self) -> Callable[[int], None]:
        """Returns what is called with the bytes of each piece that is out."""
        request = self._request
        listener = self._options.progress
        meter = (
            None if listener is None else ProgressMeter(request.step, request.own_bytes, listener)
        )

        def progress(nbytes: int) -> None:
            request.cancellation.check(request.step, self._process)
            if meter is not None:
                meter.add(nbytes)

        return progress

    def _check_space(self) -> None:
        """Refuses, at the primary and before a byte is written, what the disk has no room for."""
        storage = self._target.storage
        if not self._options.check_free_space or self._process or storage.posix is None:
            return
        # What may be linked is known only when it is compared: the save may need almost nothing.
        may_link = self._history is not None and self._history.is_known
        need = SPARE_BYTES + (0 if may_link else self._request.total_bytes)
        free = shutil.disk_usage(storage.root).free
        if need > free:
            raise OSError(
                errno.ENOSPC,
                f"step {self._request.step} needs {need:,} bytes, {free:,} are free; delete old"
                " steps or keep fewer",
                storage.root,
            )

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record, at the primary. Raises SaveFailed where the reports do not fit."""
        request = self._request
        items: dict[str, tuple[Plan | None, list[ItemReport]]] = {}
        for name in [*request.trees, *request.values, *request.files]:
            plan = request.trees[name][0] if name in request.trees else None
            shares = [report.items[name] for report in reports]
            if plan is not None:
                check_reports(name, plan, shares)
            elif name in request.values and not request.values[name].per_process:
                check_json(name, shares)
            elif name in request.files:
                check_own_names(name, shares)
            items[name] = (plan, shares)
        self._items = items
        self._branch = self._current_branch()
        return self._record(items)

    def _current_branch(self) -> BranchStart | None:
        """Returns the branch of the root's history that the save belongs to."""
        return None

    def _record(self, items: Mapping[str, tuple[Plan | None, list[ItemReport]]]) -> bytes:
        request = self._request
        return build_record(
            RecordHead(
                request.step,
                writer=request.save_id,
                processes=self._target.group.count,
                started_s=request.started_s,
                finished_s=time.time(),
                metrics=request.metrics,
                metadata=request.metadata,
                opening=None if self._branch is None else self._branch.number,
            ),
            items,
        )

    def check(self, record: bytes) -> None:
        """Reads the record as a reader will, without what was read at an earlier save.

        That is what a plan alone says (see check_plan), and a layout.
        """
        unread = [
            plan
            for plan, _ in self._items.values()
            if plan is not None and plan.cache.get("layout is unread")
        ]
        where = self._target.where
        if unread:
            check_record(record, where)
            for plan in unread:
                plan.cache["layout is unread"] = False
            return
        check_record_size(record, where)
        without_plans = {name: (None, shares) for name, (_, shares) in self._items.items()}
        check_record(self._record(without_plans), where)
        for _, shares in self._items.values():
            for kind, text in (value for share in shares for value in share.values):
                decode_value(kind, text)

    def plans(self) -> Mapping[str, Plan]:
        """Returns the plans of the trees."""
        return {item: plan for item, (plan, _) in self._request.trees.items()}

    def replicas(self) -> Mapping[str, ReplicaSums]:
        """Returns the sums of the trees' replicas, by item."""
        return self._request.replicas

    def own_files(self) -> list[str]:
        """Returns the files that this process writes, by names relative to the step's folder."""
        save_id = self._request.save_id
        # A pack of an incremental save may be several files: the links, and what was written.
        files_per_pack = 1 if self._history is None else NAMES
        names = [
            f"{item}/{pack_name(self._process, pack * files_per_pack + number, save_id)}"
            for item, plan in self.plans().items()
            for pack in plan.own
            for number in range(files_per_pack)
        ]
        names += [
            f"{item}/{bin_name(self._process, number, save_id)}"
            for item, staged in self._request.files.items()
            for number in range(len(staged))
        ]
        names += [
            f"{item}/{json_name(self._process, save_id)}"
            for item, value in self._request.values.items()
            if self._writes(value)
        ]
        return names

    def steps_crc(self) -> int:
        """Returns what tells the steps that this process knows from others."""
        return 0

    def superfluous(self, *, list_steps: bool) -> Superfluous:
        """Returns what the save makes superfluous, at the primary, once it is committed."""
        return Superfluous()


@dataclass(frozen=True, kw_only=True)
class RootState:
    """What one process knows of a root that it has open, and its worker there.

    `leave` takes the branch and the number of each step that is saved: see `LocalTier.leave`.
    `make_way` takes the store, the folder of each step before the primary writes there, and the
    claim: see `ForeignSteps.make_way`.
    """

    index: StepIndex
    order: StepOrder
    statistics: Statistics
    worker: BackgroundWorker
    lineage: Lineage | NoLineage
    reporter: RootReporter | NoReporter
    misses: Misses
    leave: Callable[[BranchStart, int], None] = lambda branch, step: None
    make_way: Callable[[Storage, str, str], None] = lambda storage, folder, claim: None
    history: SaveHistory | None = None  # of incremental saves


class _StepWork(SnapshotWork):
    """Writes a step of a root, whose index says what the step makes superfluous."""

    def __init__(
        self, request: SaveRequest, target: SaveTarget, options: Options, state: RootState
    ) -> None:
        super().__init__(
            request, target, options, history=state.history, statistics=state.statistics
        )
        self._state = state

    def write(self) -> Mapping[str, ItemReport]:
        """Writes this process's share, durably; reports it. Raises StepExists too."""
        if self._process == 0:
            target = self._target
            self._state.make_way(target.timed_storage, target.folder, target.claim)
        return super().write()

    def _current_branch(self) -> BranchStart | None:
        request = self._request
        branch = self._state.lineage.current(request.key, request.place, self._target.end_s)
        return None if branch is None else branch.start

    def steps_crc(self) -> int:
        return self._state.index.crc()

    def superfluous(self, *, list_steps: bool) -> Superfluous:
        index = self._state.index
        list_steps |= index.leave_marked()
        deleted = self._delete_superfluous()
        steps = tuple(index.steps()) if list_steps else None
        left = None
        if list_steps or self._request.place.is_branch:
            left = tuple(sorted(index.left_behind() - {self._request.step}))
        return Superfluous(deleted, steps, left, self._branch)

    def _delete_superfluous(self) -> tuple[int, ...]:
        """Deletes what the keep policy lets go; returns what went. What stays, stays on all."""
        index = self._state.index
        end_s = self._target.end_s
        try:
            superfluous = index.superfluous(self._request.facts, end_s=end_s)
            remaining = index.remove(superfluous, end_s=end_s)
        except Exception as error:
            # The step is saved. What should go may go after the next save.
            _log.warning(
                "which steps to delete after step %d could not be decided: %s",
                self._request.step,
                error,
            )
            return ()
        return tuple(step for step in superfluous if step not in remaining)


@dataclass(frozen=True)
class StepSaver:
    """Does the saves of a root's steps, and brings the root's state up to date after each."""

    root: OpenRoot
    state: RootState

    @property
    def storage(self) -> Storage:
        """The store of the root."""
        return self.root.storage

    @property
    def options(self) -> Options:
        """The settings of the manager."""
        return self.root.options

    def target(self, request: SaveRequest) -> SaveTarget:
        """Returns where a save goes."""
        root = self.root
        return SaveTarget(
            root.storage,
            root.group,
            request.key,
            folder=request.folder,
            claim=f"{FOLDER}/{root.writer.id}",
            messages=f"{root.messages}/{request.counter % MESSAGE_NAMES}",
            timeout_s=root.options.save_timeout_s,
            overwrite=request.overwrite,
            next_miss=self.state.misses.next(may_miss=request.may_miss),
            refuses_drift=root.options.on_replicas_differ == "raise",
            reports_step=True,
            worker=self.state.worker,
            began=request.began,
            cancellation=request.cancellation,
        )

    def run(self, request: SaveRequest) -> SaveResult:
        """Does the whole save. Blocks for its time and RESULT_WAIT_S at most.

        A failure is in the result. When it returns, the step is in the index, superfluous ones are
        not, and the statistics count it.
        """
        root = self.root
        target = self.target(request)
        linked_bytes = self.state.statistics.save_linked_bytes
        try:
            result = run_protocol(target, _StepWork(request, target, root.options, self.state))
        except Exception as error:
            # A defect. Whatever it is, the caller learns of it at its next call.
            failure = failure_of(error, request.step, root.group.index)
            failure.__cause__ = error if failure is not error else error.__cause__
            result = SaveResult(request.key, failure)
        finally:
            request.release()
        if self.state.history is not None:
            self.state.history.end(committed=result.error is None)
        is_new = self.state.misses.note(result)
        if is_new and root.group.index == 0:
            root.group.report(saves_missed=result.missed)
        if result.is_there:
            self.state.index.learn(request.step)
        if result.error is not None:
            self._note_failure(request, result.error, missed=bool(result.missed))
            return result
        self._note_step(request, result)
        incremental = self.state.statistics.save_linked_bytes > linked_bytes
        took_s = time.monotonic() - request.began
        saved = SavedStep(request.total_bytes, incremental, time.time(), took_s, request.metrics)
        self.state.reporter.saved(request.step, saved)
        return result

    def _note_failure(self, request: SaveRequest, error: HoldfastError, *, missed: bool) -> None:
        if isinstance(error, SaveCancelled):
            return
        group = self.root.group
        self.state.statistics.add(saves_failed=1, saves_missed=int(missed))
        trouble = str(error)
        if missed:
            trouble = f"{self.state.misses.text}; the next save tries again: {error}"
            _log.warning("a save failed, and training goes on: %s", trouble)
        # All processes have the same error: the one that failed reports it for all.
        if group.index == (getattr(error, "process", None) or 0):
            group.report(trouble=trouble)

    def _note_step(self, request: SaveRequest, result: SaveResult) -> None:
        """Brings statistics, index and claim up to date after a commit."""
        index = self.state.index
        self.state.statistics.add(
            saves=1,
            save_s=time.monotonic() - request.began,
            save_bytes=request.total_bytes,
            replicas_differed=int(bool(result.drift)),
        )
        if result.steps is not None:
            index.adopt(result.steps)
        if result.left_behind is not None:
            index.adopt_left(result.left_behind)
        index.add(request.facts)
        self.state.order.saved(request.place)
        if self.root.group.index:  # the primary has deleted them
            index.remove(result.superfluous)
        if result.branch is not None:
            self.state.leave(result.branch, request.step)
        if self.root.group.index:
            return
        if self.storage.posix is not None:
            return

        def announce() -> None:
            end_s = time.monotonic() + self.options.save_timeout_s
            write_hint(until(self.storage, end_s), request.step, request.save_id)
            # A claim that was not renewed for a day counts as dead, where a store has no locks.
            self.root.claims.until(end_s).take(self.root.writer)

        self.state.worker.put(f"announcing step {request.step}, and renewing the claim", announce)

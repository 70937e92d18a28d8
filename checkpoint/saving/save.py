"""The save of a tree that is in memory, a manager's or a single one: what it writes, and what the
manager brings up to date after it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.multihost import Group

from ..agreement.save_protocol import SaveReport, SaveResult, Superfluous
from ..errors import CheckpointError, CommitUnknown, failure_of
from ..format.item_report import ItemReport, bin_name, json_name, pack_name
from ..format.record import check_record, check_record_size
from ..format.step_folders import has_record
from ..format.values import decode_value
from ..options import Options, ProgressMeter, Statistics
from ..steps.background import BackgroundWorker
from ..steps.claims import FOLDER, Claims, Writer
from ..steps.index import StepIndex
from ..steps.lineage import Lineage
from ..steps.root_report import RootReporter
from ..storage.base import Storage
from ..storage.local import fenced
from .commit import SaveTarget, run_protocol
from .incremental import NAMES, SaveHistory
from .item_files import ItemTarget, report_json, write_files, write_json
from .pack_writer import write_snapshot
from .plan import Plan
from .plan_mismatch import check_json, check_own_names, check_reports
from .record_builder import build_record
from .stager import SaveRequest

_log = logging.getLogger(__name__)
# saves take turns at this many names: a process that is late for one save never meets the others in
# the next
MESSAGE_NAMES = 64
SPARE_BYTES = 1 << 20  # for headers, the record and folders, when free space is checked


class SnapshotWork:
    """Writes the snapshots and values of a request. `context` is the manager's, if there is one."""

    def __init__(
        self,
        request: SaveRequest,
        target: SaveTarget,
        options: Options,
        context: SaveContext | None = None,
    ) -> None:
        self._request = request
        self._target = target
        self._options = options
        self._context = context
        self._index = None if context is None else context.index
        self._process = target.group.index
        self._items: Mapping[str, tuple[Plan | None, list[ItemReport]]] = {}
        self._opening: int | None = None

    def write(self) -> Mapping[str, ItemReport]:
        """Writes this process's share, durably; reports it."""
        request = self._request
        storage = self._target.storage
        listener = self._options.progress
        if request.broken is not None:
            raise request.broken
        self._check_space()
        meter = (
            None if listener is None else ProgressMeter(request.step, request.own_bytes, listener)
        )

        def progress(nbytes: int) -> None:
            request.cancellation.check(request.step, self._process)
            if meter is not None:
                meter.add(nbytes)

        items = {}
        try:
            for name, (_, snapshot) in request.trees.items():
                items[name] = write_snapshot(
                    snapshot,
                    self._place(name),
                    progress=progress,
                    history=self._history,
                    statistics=None if self._context is None else self._context.statistics,
                )
            for name, value in request.values.items():
                if value.per_process or not self._process:
                    items[name] = write_json(self._place(name), self._process, value.data)
                else:
                    items[name] = report_json(self._process, value.data)
            for name, staged in request.files.items():
                items[name] = write_files(self._place(name), self._process, staged, progress)
        except FileNotFoundError as error:
            if storage.list(self._target.claim):
                raise
            raise fenced(
                f"{storage.root}/{self._target.claim}"
            ) from error  # and what it was writing has been swept
        return items

    def _place(self, item: str) -> ItemTarget:
        target = self._target
        return ItemTarget(target.storage, target.folder, item, self._request.save_id)

    @property
    def _history(self) -> SaveHistory | None:
        return None if self._context is None else self._context.history

    def _check_space(self) -> None:
        """Refuses, at the primary and before a byte is written, a save that the disk has no room
        for.
        """
        storage = self._target.storage
        if not self._options.check_free_space or self._process or storage.posix is None:
            return
        may_link = (
            self._history is not None and self._history.is_known
        )  # how much will be written is known once it is
        root = storage.root
        need = SPARE_BYTES + (0 if may_link else self._request.total_bytes)
        free = shutil.disk_usage(root).free
        if need > free:
            raise OSError(
                28,
                f"step {self._request.step} needs {need:,} bytes, {free:,} are free; delete old"
                " steps or keep fewer",
                root,
            )

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record, at the primary. Raises SaveFailed where the reports do not fit
        together.
        """
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
        opening = (
            None
            if self._context is None or self._context.lineage is None
            else self._context.lineage.current()
        )
        self._opening = None if opening is None else opening.number
        return self._record(items)

    def _record(self, items: Mapping[str, tuple[Plan | None, list[ItemReport]]]) -> bytes:
        request = self._request
        return build_record(
            request.step,
            items,
            writer=request.save_id,
            processes=self._target.group.count,
            started_s=request.started_s,
            finished_s=time.time(),
            metrics=request.metrics,
            metadata=request.metadata,
            opening=self._opening,
        )

    def check(self, record: bytes) -> None:
        """Reads the record as a reader will, but for what has been read before: what a plan alone
        says (see check_plan), and a layout.
        """
        if unread := [
            plan
            for plan, _ in self._items.values()
            if plan is not None and plan.cache.get("layout is unread")
        ]:
            check_record(record, self._target.where)
            for plan in unread:
                plan.cache["layout is unread"] = False
            return
        check_record_size(record, self._target.where)
        check_record(
            self._record({name: (None, shares) for name, (_, shares) in self._items.items()}),
            self._target.where,
        )
        for _, shares in self._items.values():
            for kind, text in (value for share in shares for value in share.values):
                decode_value(kind, text)

    def plans(self) -> Mapping[str, Plan]:
        """Returns the plans of the trees."""
        return {item: plan for item, (plan, _) in self._request.trees.items()}

    def own_files(self) -> list[str]:
        """Returns the files that this process writes, by names relative to the step's folder."""
        save_id = self._request.save_id
        each = range(NAMES) if self._history is not None else [0]
        numbers = [
            (item, pack * len(each) + more)
            for item, plan in self.plans().items()
            for pack in plan.own
            for more in each
        ]
        packs = [f"{item}/{pack_name(self._process, number, save_id)}" for item, number in numbers]
        values = [
            item
            for item, value in self._request.values.items()
            if value.per_process or not self._process
        ]
        numbered = [
            (item, number)
            for item, staged in self._request.files.items()
            for number in range(len(staged))
        ]
        files = [f"{item}/{bin_name(self._process, number, save_id)}" for item, number in numbered]
        return packs + files + [f"{item}/{json_name(self._process, save_id)}" for item in values]

    def steps_crc(self) -> int:
        """Returns what tells the steps that this process knows from others."""
        return self._index.crc() if self._index is not None else 0

    def superfluous(self, *, list_steps: bool) -> Superfluous:
        """Returns what the save makes superfluous, at the primary, once it is committed."""
        if self._index is None:
            return Superfluous()
        steps = tuple(self._index.steps()) if list_steps else None
        try:
            return Superfluous(tuple(self._index.superfluous(self._request.facts)), steps)
        except Exception as error:  # the step is saved; what should go may go after the next save
            _log.warning(
                "which steps to delete after step %d could not be decided: %s",
                self._request.step,
                error,
            )
            return Superfluous((), steps)


@dataclass(frozen=True)
class SaveContext:
    """What all saves of a manager share: store, group and claim, and what is brought up to date
    when one ends.
    """

    storage: Storage
    group: Group
    claims: Claims
    writer: Writer
    options: Options
    index: StepIndex
    worker: BackgroundWorker
    statistics: Statistics
    history: SaveHistory | None = None  # of incremental saves
    lineage: Lineage | None = None  # at the primary
    root_reporter: RootReporter | None = None  # at the primary

    def run(self, request: SaveRequest) -> SaveResult:
        """Does a whole save: see `run_save`."""
        return run_save(request, self)

    def target(self, request: SaveRequest) -> SaveTarget:
        """Returns where a save goes."""
        return SaveTarget(
            self.storage,
            self.group,
            request.key,
            folder=request.folder,
            claim=f"{FOLDER}/{self.writer.id}",
            messages=f"checkpoint/{self.writer.id}/{request.counter % MESSAGE_NAMES}",
            timeout_s=self.options.save_timeout_s,
            overwrite=request.overwrite,
            reports_step=True,
            worker=self.worker,
            began=request.began,
            cancellation=request.cancellation,
        )


def run_save(request: SaveRequest, context: SaveContext) -> SaveResult:
    """Does the whole save. Blocks for its time and RESULT_WAIT_S at most; a failure is in the
    result.

    When it returns, the step is in the index, superfluous ones are not, and the statistics count
    it.
    """
    target, linked_bytes = context.target(request), context.statistics.save_linked_bytes
    try:
        result = run_protocol(target, SnapshotWork(request, target, context.options, context))
    except Exception as error:  # a defect; whatever it is, the caller learns of it at its next call
        failure = failure_of(error, request.step, context.group.index)
        failure.__cause__ = error if failure is not error else error.__cause__
        result = SaveResult(request.key, failure)
    finally:
        request.release()
    _take_note(request, result, context)
    if result.error is None and context.root_reporter is not None:
        context.root_reporter.saved(
            request.step,
            request.total_bytes,
            incremental=context.statistics.save_linked_bytes > linked_bytes,
        )
    return result


def _take_note(request: SaveRequest, result: SaveResult, context: SaveContext) -> None:
    """Brings statistics, claim, index and history up to date after a save."""
    if context.history is not None:
        context.history.end(committed=result.error is None)
    if result.error is not None:
        context.statistics.add(saves_failed=1)
        if context.group.index == (
            getattr(result.error, "process", None) or 0
        ):  # one speaks for all
            context.group.report(trouble=str(result.error))
        if isinstance(result.error, CommitUnknown) and context.group.index == 0:
            _look_again(request, context)
        return
    context.statistics.add(
        saves=1, save_s=time.monotonic() - request.began, save_bytes=request.total_bytes
    )
    if result.steps is not None:
        context.index.adopt(result.steps)
    context.index.add(request.facts)
    context.index.remove(result.superfluous)
    if context.group.index == 0:
        try:
            context.claims.take(context.writer)
        except (OSError, CheckpointError) as error:
            _log.warning(
                "the claim on %s could not be renewed, it is tried again after the next save: %s",
                context.storage.root,
                error,
            )


def _look_again(request: SaveRequest, context: SaveContext) -> None:
    """Knows the step, at the primary, if its record is there after all; the others learn it with
    the next save.
    """

    def look() -> None:
        if has_record(context.storage, request.folder):
            context.index.add(request.facts)

    context.worker.put(f"looking whether step {request.step} was saved", look)

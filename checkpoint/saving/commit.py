"""One save, in the background: write, agree, commit, and take note of the result.

Every process walks through the same two messages whatever happens to it: a gather of reports, and a broadcast of the result. A process
that cannot save says so in its report; the primary alone commits; a process that receives no result reads the record.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from typing import Any

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..errors import CheckpointError, CommitUnknown, SaveFailed, StepExists, StepNotFound, failure_of
from ..format.record import read_record
from ..options import Options, ProgressMeter, Statistics
from ..policy import StepFacts
from ..steps.claims import FOLDER, Claims, Writer
from ..steps.garbage import BackgroundWorker, delete_files, delete_save
from ..steps.index import StepIndex
from ..storage.base import NotCommitted, Storage
from ..storage.local import LocalStorage, fenced
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .pack_writer import write_json, write_snapshot
from .plan import Plan
from .plan_mismatch import PlansDiffer, check_reports, explain, receive_result
from .protocol import SaveReport, SaveResult, check_save_reports
from .record_builder import build_record
from .stager import SaveRequest

_log = logging.getLogger(__name__)
MESSAGE_NAMES = 64  # saves take turns at this many names: a process that is late for one save never meets the others in the next
RESULT_WAIT_S = 30.0  # what the primary's result may take beyond the save's own time
READ_TRIES = 3  # of a record that settles an unclear commit
SPARE_BYTES = 1 << 20  # for headers, the record and folders, when free space is checked


@dataclass(frozen=True)
class SaveContext:
    """What all saves of a manager share: store, group and claim, and what is brought up to date when one ends."""

    storage: Storage
    group: Group
    claims: Claims
    writer: Writer
    options: Options
    index: StepIndex
    worker: BackgroundWorker
    statistics: Statistics

    @property
    def claim_folder(self) -> str:
        """The folder of the claim, in the store."""
        return f"{FOLDER}/{self.writer.id}"

    def message_name(self, request: SaveRequest) -> str:
        """Returns what the names of a save's messages begin with."""
        return f"checkpoint/{self.writer.id}/{request.counter % MESSAGE_NAMES}"

    def remaining_s(self, request: SaveRequest) -> float:
        """Returns the seconds that remain of a save's time."""
        return max(0.0, request.began + self.options.save_timeout_s - time.monotonic())


def run_save(request: SaveRequest, context: SaveContext) -> SaveResult:
    """Does the whole save. Blocks for its time and RESULT_WAIT_S at most; a failure is in the result.

    When it returns, the step is in the index, superfluous ones are not, and the statistics count it.
    """
    try:
        result = _save(request, context)
    except Exception as error:  # whatever it is, the caller learns of it at its next call
        failure = failure_of(error, request.step, context.group.index)
        failure.__cause__ = error if failure is not error else error.__cause__
        result = SaveResult(request.step, failure)
    finally:
        request.release()
    _take_note(request, result, context)
    return result


def _save(request: SaveRequest, context: SaveContext) -> SaveResult:
    report, own_error = _write(request, context)
    result = _lead(request, context, report) if context.group.index == 0 else _follow(request, context, report)
    if result.error is not None:
        result.error.__cause__ = own_error or result.error.__cause__
        if not isinstance(result.error, CommitUnknown):
            _clean(request, context)
    return result


def _write(request: SaveRequest, context: SaveContext) -> tuple[SaveReport, Exception | None]:
    """Writes this process's share; returns its report, or one that says why there is none."""
    index, storage, listener = context.group.index, context.storage, context.options.progress
    try:
        if request.broken is not None:
            raise request.broken
        _check_space(request, context)
        progress = None if listener is None else ProgressMeter(request.step, request.own_bytes, listener).add
        items = {}
        for name, (_, snapshot) in request.trees.items():
            items[name] = write_snapshot(snapshot, storage, str(request.step), name, request.save_id, progress=progress)
        for name, value in request.values.items():
            items[name] = write_json(storage, str(request.step), name, request.save_id, index, value)
        return SaveReport(index, request.counter, request.step, items), None
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not storage.list(context.claim_folder):
            error = fenced(f"{storage.root}/{context.claim_folder}")  # and what it was writing has been swept
        return SaveReport.of_error(index, request.counter, request.step, error), error


def _check_space(request: SaveRequest, context: SaveContext) -> None:
    """Refuses, at the primary and before a byte is written, a save that the disk has no room for."""
    if not context.options.check_free_space or context.group.index or not isinstance(context.storage, LocalStorage):
        return
    root, need = context.storage.root, request.total_bytes + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if need > free:
        raise OSError(28, f"step {request.step} needs {need:,} bytes, {free:,} are free; delete old steps or keep fewer", root)


def _lead(request: SaveRequest, context: SaveContext, report: SaveReport) -> SaveResult:
    """Does the primary's part: gathers the reports, commits, and sends the result to all."""
    group, name = context.group, context.message_name(request)
    try:
        gathered = group.gather(f"{name}/report", report.to_bytes(), timeout_s=context.remaining_s(request) or 0.001)
        assert gathered is not None
        _commit(request, context, [SaveReport.from_bytes(data) for data in gathered])
        result = SaveResult(request.step, None, _superfluous(request, context))
    except PlansDiffer as error:
        result = SaveResult(request.step, explain(group, name, error, request.trees[error.item][0]))
    except Exception as error:
        result = SaveResult(request.step, failure_of(error, request.step, 0))
    try:
        group.broadcast(f"{name}/outcome", result.to_bytes(), timeout_s=context.remaining_s(request) + RESULT_WAIT_S)
    except HoldfastError as error:  # they read the record
        _log.warning("the result of the save of step %d could not be sent to the other processes: %s", request.step, error)
    return result


def _superfluous(request: SaveRequest, context: SaveContext) -> tuple[int, ...]:
    try:
        return tuple(context.index.superfluous(StepFacts(request.step, request.metrics)))
    except Exception as error:  # the step is saved; what should go may go after the next save
        _log.warning("which steps to delete after step %d could not be decided: %s", request.step, error)
        return ()


def _follow(request: SaveRequest, context: SaveContext, report: SaveReport) -> SaveResult:
    """Does the part of all others: reports, and receives the result; without one it reads the record."""
    name = context.message_name(request)
    lost: HoldfastError | None = None
    try:
        context.group.gather(f"{name}/report", report.to_bytes(), timeout_s=context.remaining_s(request) or 0.001)
    except HoldfastError as error:
        lost = error
    try:
        plans = {item: plan for item, (plan, _) in request.trees.items()}
        return receive_result(context.group, name, plans, context.remaining_s(request) + RESULT_WAIT_S)
    except HoldfastError as error:
        return _result_by_record(request, context, lost or error)


def _result_by_record(request: SaveRequest, context: SaveContext, error: HoldfastError) -> SaveResult:
    """Reads the record: if it is this save's, the save is committed; else nobody here can know."""
    if _writer_of(context.storage, str(request.step)) == request.save_id:
        return SaveResult(request.step)
    unknown = CommitUnknown(
        f"whether step {request.step} was saved is not known here: {error}. It may yet appear, whole or not at all; "
        "the next manager that is opened knows",
        step=request.step,
        path=context.storage.root,
    )
    unknown.__cause__ = error
    return SaveResult(request.step, unknown)


def _commit(request: SaveRequest, context: SaveContext, reports: list[SaveReport]) -> None:
    """Checks the reports and makes the step exist, in one atomic operation."""
    check_save_reports(reports, request.counter, request.step)
    items: dict[str, tuple[Plan | None, list[Any]]] = {}
    for name in [*request.trees, *request.values]:
        plan = request.trees[name][0] if name in request.trees else None
        shares = [report.items[name] for report in reports]
        if plan is not None:
            check_reports(name, plan, shares)
        items[name] = (plan, shares)
    record = build_record(
        request.step,
        items,
        writer=request.save_id,
        processes=context.group.count,
        started_s=request.started_s,
        finished_s=time.time(),
        metrics=request.metrics,
        metadata=request.metadata,
    )
    replaced = _named_files(request, context) if request.overwrite else set()
    if not context.remaining_s(request):
        timeout_s = context.options.save_timeout_s
        raise SaveFailed(f"step {request.step} was not saved: it took longer than save_timeout_s={timeout_s:g}", step=request.step)
    commit_record(context.storage, str(request.step), record, context.claim_folder, request.save_id, replace=request.overwrite)
    written = {f"{name}/{file.name}" for name, (_, shares) in items.items() for share in shares for file in share.files}
    try:
        if replaced:
            delete_files(context.storage, request.step, sorted(replaced - written))
    except OSError as error:  # the step is saved; the next sweep finds them
        _log.warning("what step %d was before could not be deleted: %s", request.step, error)


def commit_record(storage: Storage, step_dir: str, record: bytes, claim_folder: str, save_id: str, *, replace: bool = False) -> None:
    """Gives a record its name: from then on the step exists. The one way to commit, for managers, one-shot saves and conversions. Blocks.

    Raises Fenced, NotCommitted and StepExists where the record is not there and never will be: what was written for it may be deleted.
    Raises CommitUnknown where the answer was unclear (EIO of the folder's fsync, a time-out) and reading the record does not settle it:
    nothing may be deleted then but by a sweep, once the claim is fenced.
    """
    where = join(storage.root, step_dir)
    try:
        storage.commit(join(step_dir, RECORD_NAME), record, claim_folder, replace=replace)
    except NotCommitted:
        raise
    except OSError as error:
        writer = _writer_of(storage, step_dir)
        exists = isinstance(error, FileExistsError)
        if exists and writer == save_id:
            return
        if exists and writer:
            message = f"{where} holds a checkpoint already, saved by another writer meanwhile; nothing was changed"
            raise StepExists(message, path=where) from None
        state = "it has its record, but whether that is durable" if writer == save_id else "whether it has its record"
        message = f"{where} may or may not be saved: {state} is not known: {error}; the next manager that is opened knows"
        raise CommitUnknown(message, path=where) from error


def _writer_of(storage: Storage, step_dir: str) -> str:
    """Returns whose record is there; "" where there is none, or none that can be read."""
    for _ in range(READ_TRIES):
        try:
            return read_record(storage, step_dir).writer_id
        except StepNotFound:
            return ""
        except (CheckpointError, OSError):
            continue
    return ""


def _named_files(request: SaveRequest, context: SaveContext) -> set[str]:
    """Returns the files that the step's record names; none where it is damaged: what it named stays until somebody looks."""
    try:
        return set(read_record(context.storage, str(request.step)).file_names())
    except CheckpointError:
        return set()


def _clean(request: SaveRequest, context: SaveContext) -> None:
    """Deletes what this process wrote; what cannot be deleted now is left to the background worker."""
    items = [*request.trees, *request.values]

    def delete() -> None:
        delete_save(context.storage, request.step, items, context.group.index, request.save_id)

    try:
        delete()
    except OSError as error:
        _log.warning("the files of the failed save of step %d could not be deleted yet: %s", request.step, error)
        context.worker.put(f"deleting what is left of the failed save of step {request.step}", delete)


def _take_note(request: SaveRequest, result: SaveResult, context: SaveContext) -> None:
    """Brings statistics, claim and index up to date after a save."""
    if result.error is not None:
        context.statistics.add(saves_failed=1)
        return
    context.statistics.add(saves=1, save_s=time.monotonic() - request.began, save_bytes=request.total_bytes)
    context.group.report(saved_step=request.step)
    context.index.add(StepFacts(request.step, request.metrics))
    context.index.remove(result.superfluous)
    if context.group.index == 0:
        try:
            context.claims.take(context.writer)
        except (OSError, CheckpointError) as error:
            _log.warning("the claim on %s could not be renewed, it is tried again after the next save: %s", context.storage.root, error)

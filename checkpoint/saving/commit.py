"""One save on one process: carries out what the protocol asks for.

The protocol lacks the store, the group and the clock: they come in here. A manager's save, a
one-shot save, a conversion and a local save differ in the work alone: how packs are written, and
what the record is made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from holdfast.coordination import BarrierTimeout, Fenced, HoldfastError, ProcessLost
from holdfast.multihost.group.group import SaveStage, runtime_indices
from holdfast.multihost.instruments import amount

from ..agreement.absence import NOT_CALLED, LateWatch
from ..agreement.save_protocol import (
    BuildRecord,
    Built,
    Commit,
    Committed,
    DeleteSuperfluous,
    Effect,
    Event,
    Failed,
    Found,
    Gather,
    Gathered,
    Hear,
    Heard,
    Prepare,
    Prepared,
    ReadRecord,
    RecordAbsent,
    RecordFound,
    RecordUnreadable,
    Refused,
    SaveReport,
    SaveResult,
    Saving,
    Sent,
    Superfluous,
    Tell,
    Told,
    Unclear,
    drive,
    follow,
    lead,
)
from ..errors import (
    CheckpointError,
    SaveFailed,
    StepExists,
    StepNotFound,
    failure_of,
)
from ..format.record import parse_record, read_record
from ..steps.step_files import delete_files
from ..storage.base import NameTaken, NotCommitted
from ..storage.path import join
from ..storage.retries import until
from ..storage.tombstone import RECORD_NAME
from .plan_mismatch import PlansDiffer, explain, receive_result
from .replicas import find_drift
from .stager import OneSave

_log = logging.getLogger(__name__)
RESULT_WAIT_S = 30.0  # what the primary's result may take beyond the save's own time
DELETE_S = 5.0  # for what a failed save has written; what stays is deleted in the background
LOCAL_REPORT_S = 1.0  # for the reports of a local save, beyond its own time
LOOK_S = 10.0  # for the record that settles how a save ended, when its own time may be over
NAMED_LEAVES = 5  # of those that were lost
_REFUSALS = (NotCommitted, StepExists, Fenced)  # of a commit, for certain
# What other people's tools call the effects.
_PHASES: dict[type, str] = {
    Prepare: "write",
    Gather: "gather",
    BuildRecord: "build",
    Commit: "commit",
    ReadRecord: "look",
    DeleteSuperfluous: "delete",
    Tell: "tell",
    Hear: "hear",
}


class SaveWork(Protocol):
    """What kinds of saves differ in."""

    def write(self) -> Prepared:
        """Writes this process's share, durably; reports it."""

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record, at the primary, read as every reader will: a record that a reader
        refuses is a step that nobody restores. Raises SaveFailed where reports do not fit,
        HostileCheckpoint, Corrupt.
        """

    def committed(self, *, list_steps: bool) -> Superfluous:
        """Returns what the save makes superfluous, at the primary: by itself nothing."""
        return Superfluous()


def broken_off(save: OneSave, error: Exception) -> SaveResult:
    """Returns the result of a save that a defect ended: whatever it is, the caller learns of it."""
    failure = failure_of(error, save.step, save.group.index)
    if failure is not error:
        failure.__cause__ = error
    return SaveResult(save.key, failure)


def run_protocol(
    save: OneSave, work: SaveWork, *, next_miss: int = 0, is_unsure: bool = False
) -> SaveResult:
    """Saves, with all processes of the group. Blocks for the save's time and RESULT_WAIT_S at most;
    a failure is in the result.

    Where nothing can be committed any more, what this process wrote is deleted, but for a local
    save, which lets go of more than that. `next_miss`, `is_unsure`: see `lead`.
    """
    index = save.group.index
    kind = {"is_local": save.is_local, "is_unsure": is_unsure}
    if index == 0:
        saving = lead(save.key, next_miss=next_miss, **kind)
    else:
        saving = follow(save.key, index, **kind)
    saved: dict[str, int | str] = {}
    try:
        with save.phase() as phase:
            result = EffectPerformer(save, work).run(saving)
            if result.error is not None:
                phase.failed(result.error)
            elif save.reports_step:
                saved = {"saved_step": save.step, "trouble": "" if index else result.drift}
        amount(f"{save.kind}/bytes", save.own_bytes)
        return result
    finally:
        # One report, not two: a launcher may end a process as soon as that process is settled.
        save.report(SaveStage.SETTLED, **saved)


class EffectPerformer:
    """Carries out the effects of one process's part."""

    def __init__(self, save: OneSave, work: SaveWork) -> None:
        self._save = save
        self._work = work
        self._own_error: Exception | None = None
        self._has_tried = False  # to commit: what fails before it is a failed save
        self._is_unclear = False
        self._settled_by_s = 0.0  # by the monotonic clock, from the first look at the record on
        self._reported = False

    def run(self, saving: Saving) -> SaveResult:
        """Does the process's part; deletes what it wrote where nothing can be committed."""
        may_delete = not self._save.is_local
        try:
            result = drive(saving, self.perform)
        except BaseException:
            # Before its report nobody can commit without this process. After it, the record may
            # name what was written here.
            if may_delete and not self._reported:
                self.delete_own()
            raise
        self._add_cause(result.error)
        if may_delete and result.deletable:
            self.delete_own()
        return result

    def _add_cause(self, error: HoldfastError | None) -> None:
        """Notes this process's own error as the cause of the one that all raise. That it waited in
        vain is no cause: the sentence says for whom.
        """
        own = self._own_error
        if error is None or own is error or isinstance(own, BarrierTimeout | ProcessLost):
            return
        error.__cause__ = own or error.__cause__

    def perform(self, effect: Effect) -> Event:
        """Answers an effect. Whatever goes wrong is an answer too.

        What ends the process (Ctrl-C in a one-shot save) is raised.
        """
        try:
            with self._save.phase(_PHASES[type(effect)]):
                return self._perform(effect)
        except Exception as error:
            self._own_error = self._own_error or error
            if isinstance(effect, Commit):
                if not self._has_tried or isinstance(error, _REFUSALS):
                    return Refused(error)
                # A store that says no may have said it after it did it, and a network may say no
                # for a store that does it later.
                self._is_unclear = True
                return Unclear(error)
            if isinstance(effect, ReadRecord):
                return RecordUnreadable()
            if isinstance(effect, Tell | DeleteSuperfluous):
                # The step is saved all the same, or not.
                _log.warning(
                    "after the save of %s: %s: %s", self._save.where, type(effect).__name__, error
                )
            return Failed(error)

    def _perform(self, effect: Effect) -> Event:
        match effect:
            case Prepare():
                self._save.report(SaveStage.WRITING)
                return self._prepare()
            case Gather(report):
                return self._gather(report)
            case BuildRecord(reports):
                return self._build(reports)
            case Commit(record):
                return self._commit(record)
            case ReadRecord():
                return self._read()
            case DeleteSuperfluous(list_steps):
                return self._work.committed(list_steps=list_steps)
            case Tell(result):
                return self._tell(result)
            case Hear():
                return self._hear()

    def _prepare(self) -> Event:
        save = self._save
        for sums in save.replicas.values():
            sums.sum_on_host()
        prepared = self._work.write()
        if save.group.index:
            # The next that this process says is its report. With that others commit.
            save.close_cancelling()
        return replace(
            prepared, replicas={item: sums.report() for item, sums in save.replicas.items()}
        )

    @property
    def _result_wait_s(self) -> float:
        return self._save.remaining_s + RESULT_WAIT_S

    def _tell(self, result: SaveResult) -> Event:
        save = self._save
        told = Told(result).to_bytes()
        save.group.broadcast(f"{save.messages}/outcome", told, timeout_s=self._result_wait_s)
        return None

    def _hear(self) -> Event:
        save = self._save
        wait_s = self._result_wait_s
        return Heard(
            receive_result(save.group, save.messages, save.plans, save.replicas, timeout_s=wait_s)
        )

    def _gather(self, report: SaveReport) -> Event:
        save = self._save
        self._reported = True
        # Before the report, not after it: a launcher may end those who wait for a process that has
        # not reported.
        save.report(SaveStage.REPORTED)
        gathered = self._wait_for_reports(report.to_bytes())
        if gathered is None:
            return Sent()
        return Gathered([SaveReport.from_bytes(data) for data in gathered])

    def _wait_for_reports(self, own: bytes) -> Sequence[bytes] | None:
        save = self._save
        # Once the parts of a local save had their time, a process that is late still says why.
        timeout_s = (save.remaining_s + LOCAL_REPORT_S * save.is_local) or 0.001
        with LateWatch(save.group, save.key, save.awaited, asks=not save.is_local) as late:
            try:
                return save.group.gather(f"{save.messages}/report", own, timeout_s=timeout_s)
            except BarrierTimeout as error:
                # How the time ran out nobody needs to read: the sentence says for whom.
                raise self._timed_out(error, late) from None
            except ProcessLost as error:
                if save.group.index:  # the primary may have all reports nevertheless
                    raise
                raise self._not_saved(error.message, [error.process], passes=False) from None

    def _timed_out(self, error: BarrierTimeout, late: LateWatch) -> HoldfastError:
        """Returns why not all reports came in time, and logs it: the log has it at once."""
        save = self._save
        # The primary may have all reports nevertheless; it tells who is late, unless it is.
        if save.group.index and runtime_indices(save.group)[0] not in error.missing:
            return error
        why = late.explain(error, save.timeout_s)
        _log.error("step %d waited in vain: %s", save.step, why)
        if save.group.index:
            return BarrierTimeout(why, name=error.name, missing=error.missing)
        return self._not_saved(why, error.missing, passes=NOT_CALLED not in why)

    def _not_saved(self, why: str, missing: Sequence[int | None], *, passes: bool) -> SaveFailed:
        """Returns the failure of the save, for all to hear.

        It names the leaves that went with the processes that did not report.
        """
        save = self._save
        members = enumerate(runtime_indices(save.group))
        ranks = [rank for rank, process in members if process in missing]
        plans = save.plans.values()
        lost = sorted(
            {path for plan in plans for rank in ranks for path in plan.held_only_by(rank)}
        )
        if lost:
            more = f" and {len(lost) - NAMED_LEAVES} more" if len(lost) > NAMED_LEAVES else ""
            why += f"; nobody else held all of {', '.join(lost[:NAMED_LEAVES])}{more}"
        return SaveFailed(
            f"step {save.step} was not saved: {why}",
            step=save.step,
            process=next(iter(missing), None),
            passes=passes,
        )

    def _build(self, reports: Sequence[SaveReport]) -> Event:
        save = self._save
        try:
            record = self._work.build(reports)
        except PlansDiffer as error:
            return Failed(explain(save.group, save.messages, error, save.plans.get(error.item)))
        drift = find_drift(save.group, save.messages, save.replicas, reports)
        if drift is None:
            return Built(record)
        if save.root.options.on_replicas_differ == "raise":
            return Failed(drift)
        _log.warning("%s", drift)
        return Built(record, str(drift))

    def _commit(self, record: bytes) -> Event:
        """Makes the step exist, in one atomic operation."""
        save = self._save
        if save.is_local:
            save.close_cancelling()
            return Committed()
        if not save.remaining_s:
            raise SaveFailed(
                f"step {save.step} was not saved: it took longer than"
                f" save_timeout_s={save.timeout_s:g}",
                step=save.step,
                passes=True,
            )
        save.report(SaveStage.COMMITTING)
        # Read before the commit: after it, nothing says what the old record named.
        replaced = set(self._named_files()) if save.overwrite else set()
        self._name_record(record)
        if replaced:
            # An incremental save links files of the step that it replaces: those stay.
            self._delete_replaced(replaced - set(parse_record(record, save.where).file_names()))
        return Committed()

    def _name_record(self, record: bytes) -> None:
        save = self._save
        name = join(save.folder, RECORD_NAME)
        save.close_cancelling()
        self._has_tried = True
        try:
            save.storage.commit(name, record, save.claim, replace=save.overwrite)
        except NameTaken:
            raise StepExists(
                f"{save.where} holds a checkpoint already, saved meanwhile; nothing was changed",
                step=save.step,
                path=save.where,
            ) from None

    def _named_files(self) -> list[str]:
        """Returns the files that the record in place names; none where the record is damaged.

        What a damaged record named stays until somebody looks.
        """
        try:
            return read_record(self._save.storage, self._save.folder).file_names()
        except CheckpointError:
            return []

    def _delete_replaced(self, names: set[str]) -> None:
        try:
            delete_files(self._save.storage, self._save.folder, sorted(names))
        except OSError as error:  # the step is saved; a sweep finds them
            _log.warning("what %s was before could not be deleted: %s", self._save.where, error)

    def _read(self) -> Found:
        save = self._save
        self._settled_by_s = self._settled_by_s or time.monotonic() + LOOK_S
        storage = until(save.root.storage, max(save.end_s, self._settled_by_s))
        try:
            found = read_record(storage, save.folder).writer_id
        except StepNotFound:
            return RecordAbsent()
        posix = save.root.storage.posix
        if found == save.key.save_id and posix is not None:
            # A kernel tells of a page that it could not write once, and then drops the page: a
            # second fsync that succeeds proves nothing.
            if self._is_unclear:
                return RecordFound(found, durable=False)
            posix.make_durable(save.folder)
        return RecordFound(found)

    def delete_own(self) -> None:
        """Deletes what this process wrote, now or by the background worker."""
        save = self._save
        names = list(save.begun)

        def delete(limit_s: float) -> None:
            storage = until(save.root.storage, time.monotonic() + limit_s)
            delete_files(storage, save.folder, names)

        try:
            delete(min(DELETE_S, save.timeout_s))
        except OSError as error:
            _log.warning(
                "the files of the failed save of %s could not be deleted yet: %s",
                save.where,
                error,
            )
            if save.worker is not None:
                # Its time once more. What stays then a sweep finds.
                save.worker.put(
                    f"deleting what is left of the failed save of {save.where}",
                    lambda: delete(save.timeout_s),
                )

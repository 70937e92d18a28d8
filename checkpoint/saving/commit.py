"""One save on one process: carries out what the protocol asks for.

The protocol lacks the store, the group and the clock: they come in here. A manager's save, a
one-shot save, a conversion and a local save differ in the work alone: how packs are written, and
what the record is made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from holdfast.coordination import BarrierTimeout, Fenced, HoldfastError, ProcessLost
from holdfast.multihost import Group
from holdfast.multihost.group.group import SaveStage, runtime_indices
from holdfast.multihost.group.late import AwaitedSave

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
    Parsed,
    ParseRecord,
    Prepare,
    Prepared,
    ReadRecord,
    RecordAbsent,
    RecordFound,
    RecordUnreadable,
    Refused,
    SaveKey,
    SaveReport,
    SaveResult,
    Sent,
    Superfluous,
    Tell,
    Unclear,
    drive,
    follow,
    lead,
)
from ..errors import (
    CheckpointError,
    SaveCancelled,
    SaveFailed,
    StepExists,
    StepNotFound,
    failure_of,
)
from ..format.item_report import ItemReport
from ..format.record import parse_record, read_record
from ..steps.background import BackgroundWorker
from ..steps.claims import writer_of
from ..steps.step_files import delete_files
from ..storage.base import NameTaken, NotCommitted, Storage
from ..storage.path import join
from ..storage.retries import until
from ..storage.tombstone import RECORD_NAME
from .plan import Plan
from .plan_mismatch import PlansDiffer, explain, receive_result
from .replicas import ReplicaSums, find_drift

_log = logging.getLogger(__name__)
RESULT_WAIT_S = 30.0  # what the primary's result may take beyond the save's own time
DELETE_S = 5.0  # for what a failed save has written; what stays is deleted in the background
LOOK_S = 10.0  # for the record that settles how a save ended, when its own time may be over
NAMED_LEAVES = 5  # of those that were lost
_REFUSALS = (NotCommitted, StepExists, Fenced)  # of a commit, for certain


class Cancellation:
    """Calls a save off, until `close`. Thread-safe: the first call decides."""

    def __init__(self) -> None:
        # No lock: an interrupt (Ctrl-C) between its two ends would leave it held. `setdefault` of a
        # dict is one step of the interpreter.
        self._first: dict[None, str] = {}

    def cancel(self) -> bool:
        """Calls the save off; returns whether that came in time.

        In time means that nothing of the save is or will be committed.
        """
        return self._first.setdefault(None, "cancelled") == "cancelled"

    def check(self, step: int, process: int) -> None:
        """Raises SaveCancelled where the save was called off."""
        if self._first.get(None) == "cancelled":
            message = (
                f"step {step} was not saved: process {process} called it off; nothing of it stays"
            )
            raise SaveCancelled(message, step=step, process=process)

    def close(self, step: int, process: int) -> None:
        """Lets no later `cancel` come in time: from here on others may commit.

        Raises SaveCancelled where the save was called off.
        """
        self._first.setdefault(None, "closed")
        self.check(step, process)


@dataclass(frozen=True)
class SaveTarget:
    """Where a save goes, and with whom.

    `folder` is the step's in the store ("" for the root itself), `claim` the one of the writer's
    claim; the names of the save's messages begin with `messages`. `began` is by the monotonic
    clock.
    """

    storage: Storage
    group: Group
    key: SaveKey
    folder: str
    claim: str
    messages: str
    timeout_s: float
    overwrite: bool = False
    next_miss: int = 0  # its number among the misses in a row, if it may be one
    refuses_drift: bool = False  # replicas that differ are an error, not a warning
    reports_step: bool = False  # to the launcher, once it is saved
    is_local: bool = False  # onto the hosts: no record is committed, and no launcher waits for it
    # for files that cannot be deleted yet; without it they are left to a sweep
    worker: BackgroundWorker | None = None
    began: float = field(default_factory=time.monotonic)
    cancellation: Cancellation = field(default_factory=Cancellation)

    @cached_property
    def timed_storage(self) -> Storage:
        """The store for what is written: its requests end with the save's time, where they can."""
        return until(self.storage, self.end_s)

    @property
    def end_s(self) -> float:
        """When the save's time ends, by the monotonic clock."""
        return self.began + self.timeout_s

    @property
    def where(self) -> str:
        """The step's folder, as messages show it."""
        return join(self.storage.root, self.folder)

    @property
    def awaited(self) -> AwaitedSave:
        """The save as the launcher, and those who wait, know it. A manager's call has a step."""
        call = f"save({self.key.step})" if self.folder else "save"
        return AwaitedSave(call, int(writer_of(self.key.save_id), 16), self.key.counter)

    @property
    def remaining_s(self) -> float:
        """The seconds that remain of the save's time."""
        return max(0.0, self.end_s - time.monotonic())

    def report(self, stage: SaveStage, **progress: int | str) -> None:
        """Reports to the launcher where this process's part stands: it waits for the end before it
        ends a process.
        """
        if not self.is_local:
            awaited = self.awaited
            self.group.report(
                save=awaited.number, save_stage=stage, save_writer=awaited.writer, **progress
            )


class SaveWork(Protocol):
    """What kinds of saves differ in."""

    def write(self) -> Mapping[str, ItemReport]:
        """Writes this process's share, durably; reports it."""

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record, at the primary. Raises SaveFailed where reports do not fit."""

    def check(self, record: bytes) -> None:
        """Reads what `build` has built as every reader will. Raises HostileCheckpoint, Corrupt."""

    def plans(self) -> Mapping[str, Plan]:
        """Returns the plans of the items, to be explained where processes differ."""

    def replicas(self) -> Mapping[str, ReplicaSums]:
        """Returns the sums of the trees' replicas, by item."""

    def own_files(self) -> list[str]:
        """Returns the files that this process writes, by names relative to the step's folder."""

    def steps_crc(self) -> int:
        """Returns what tells the steps that this process knows from others."""

    def superfluous(self, *, list_steps: bool) -> Superfluous:
        """Returns what the save makes superfluous, at the primary, once it is committed."""


def run_protocol(target: SaveTarget, work: SaveWork, *, is_unsure: bool = False) -> SaveResult:
    """Saves, with all processes of the group. Blocks for the save's time and RESULT_WAIT_S at most;
    a failure is in the result.

    Where nothing can be committed any more, what this process wrote is deleted, but for a local
    save, which lets go of more than that. `is_unsure`: see `SaveReport`.
    """
    result: SaveResult | None = None
    try:
        result = _run(EffectPerformer(target, work), target, is_unsure=is_unsure)
        return result
    finally:
        is_saved = target.reports_step and result is not None and result.error is None
        saved: dict[str, int | str] = {}
        if is_saved:
            drift = "" if result is None or target.group.index else result.drift
            saved = {"saved_step": target.key.step, "trouble": drift}
        # One report, not two: a launcher may end a process as soon as that process is settled.
        target.report(SaveStage.SETTLED, **saved)


def _run(performer: EffectPerformer, target: SaveTarget, *, is_unsure: bool) -> SaveResult:
    group = target.group
    writers = range(group.count)
    is_local = target.is_local
    if group.index == 0:
        saving = lead(
            target.key,
            writers,
            next_miss=target.next_miss,
            is_local=is_local,
            is_unsure=is_unsure,
        )
    else:
        saving = follow(target.key, group.index, writers, is_local=is_local, is_unsure=is_unsure)
    try:
        result = drive(saving, performer.perform)
    except BaseException:
        # Before its report nobody can commit without this process. After it, the record may name
        # what was written here.
        if not performer.reported and not is_local:
            performer.delete_own()
        raise
    performer.add_cause(result.error)
    if result.deletable and not is_local:
        performer.delete_own()
    return result


class EffectPerformer:
    """Carries out the effects of one process's part."""

    def __init__(self, target: SaveTarget, work: SaveWork) -> None:
        self._target = target
        self._work = work
        self._own_error: Exception | None = None
        self._has_tried = False  # to commit: what fails before it is a failed save
        self._is_unclear = False
        self._settled_by_s = 0.0  # by the monotonic clock, from the first look at the record on
        self.reported = False

    def add_cause(self, error: HoldfastError | None) -> None:
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
                    "after the save of %s: %s: %s", self._target.where, type(effect).__name__, error
                )
            return Failed(error)

    def _perform(self, effect: Effect) -> Event:
        match effect:
            case Prepare():
                self._target.report(SaveStage.WRITING)
                return self._prepare()
            case Gather(report):
                return self._gather(report)
            case BuildRecord(reports):
                return self._build(reports)
            case ParseRecord(record):
                self._work.check(record)
                return Parsed()
            case Commit(record):
                return self._commit(record)
            case ReadRecord():
                return self._read()
            case DeleteSuperfluous(list_steps):
                return self._work.superfluous(list_steps=list_steps)
            case Tell(result):
                return self._tell(result)
            case Hear():
                return self._hear()

    def _prepare(self) -> Event:
        target = self._target
        for sums in self._work.replicas().values():
            sums.sum_on_host()
        items = self._work.write()
        if target.group.index:
            # The next that this process says is its report. With that others commit.
            target.cancellation.close(target.key.step, target.group.index)
        replicas = {item: sums.report() for item, sums in self._work.replicas().items()}
        return Prepared(items, self._work.steps_crc(), replicas)

    @property
    def _result_wait_s(self) -> float:
        return self._target.remaining_s + RESULT_WAIT_S

    def _tell(self, result: SaveResult) -> Event:
        name = f"{self._target.messages}/outcome"
        self._target.group.broadcast(name, result.to_bytes(), timeout_s=self._result_wait_s)
        return None

    def _hear(self) -> Event:
        target = self._target
        result = receive_result(
            target.group,
            target.messages,
            self._work.plans(),
            self._work.replicas(),
            timeout_s=self._result_wait_s,
        )
        return Heard(result)

    def _gather(self, report: SaveReport) -> Event:
        target = self._target
        self.reported = True
        # Before the report, not after it: a launcher may end those who wait for a process that has
        # not reported.
        target.report(SaveStage.REPORTED)
        name = f"{target.messages}/report"
        timeout_s = target.remaining_s or 0.001
        watch = LateWatch(target.group, target.key, target.awaited, asks=not target.is_local)
        with watch as late:
            try:
                gathered = target.group.gather(name, report.to_bytes(), timeout_s=timeout_s)
            except BarrierTimeout as error:
                # How the time ran out nobody needs to read: the sentence says for whom.
                raise self._timed_out(error, late) from None
            except ProcessLost as error:
                if target.group.index:  # the primary may have all reports nevertheless
                    raise
                failure = failure_of(error, target.key.step, 0)
                raise self._with_lost_leaves(failure, [error.process]) from None
        if gathered is None:
            return Sent()
        return Gathered([SaveReport.from_bytes(data) for data in gathered])

    def _timed_out(self, error: BarrierTimeout, late: LateWatch) -> HoldfastError:
        """Returns why not all reports came in time, and logs it: the log has it at once."""
        target = self._target
        # The primary may have all reports nevertheless; it tells who is late, unless it is.
        if target.group.index and runtime_indices(target.group)[0] not in error.missing:
            return error
        step = target.key.step
        why = late.explain(error, target.timeout_s)
        _log.error("step %d waited in vain: %s", step, why)
        if target.group.index:
            return BarrierTimeout(why, name=error.name, missing=error.missing)
        failure = SaveFailed(
            f"step {step} was not saved: {why}",
            step=step,
            process=next(iter(error.missing), None),
            passes=NOT_CALLED not in why,
        )
        return self._with_lost_leaves(failure, error.missing)

    def _with_lost_leaves(
        self, failure: HoldfastError, missing: Sequence[int | None]
    ) -> HoldfastError:
        """Returns the failure of the save, for all to hear.

        It names the leaves that went with the processes that did not report.
        """
        group = self._target.group
        ranks = [rank for rank, process in enumerate(runtime_indices(group)) if process in missing]
        plans = self._work.plans().values()
        lost = sorted(
            {path for plan in plans for rank in ranks for path in plan.held_only_by(rank)}
        )
        if not lost:
            return failure
        more = f" and {len(lost) - NAMED_LEAVES} more" if len(lost) > NAMED_LEAVES else ""
        message = f"{failure}; nobody else held all of {', '.join(lost[:NAMED_LEAVES])}{more}"
        step = self._target.key.step
        process = getattr(failure, "process", None)
        passes = getattr(failure, "passes", False)
        return SaveFailed(message, step=step, process=process, passes=passes)

    def _build(self, reports: Sequence[SaveReport]) -> Event:
        target = self._target
        try:
            record = self._work.build(reports)
        except PlansDiffer as error:
            plan = self._work.plans().get(error.item)
            return Failed(explain(target.group, target.messages, error, plan))
        drift = find_drift(target.group, target.messages, self._work.replicas(), reports)
        if drift is None:
            return Built(record)
        if target.refuses_drift:
            return Failed(drift)
        _log.warning("%s", drift)
        return Built(record, str(drift))

    def _commit(self, record: bytes) -> Event:
        """Makes the step exist, in one atomic operation."""
        target = self._target
        if target.is_local:
            target.cancellation.close(target.key.step, target.group.index)
            return Committed()
        if not target.remaining_s:
            message = (
                f"step {target.key.step} was not saved: it took longer than"
                f" save_timeout_s={target.timeout_s:g}"
            )
            raise SaveFailed(message, step=target.key.step, passes=True)
        target.report(SaveStage.COMMITTING)
        # Read before the commit: after it, nothing says what the old record named.
        replaced = set(self._named_files()) if target.overwrite else set()
        name = join(target.folder, RECORD_NAME)
        target.cancellation.close(target.key.step, target.group.index)
        self._has_tried = True
        try:
            target.timed_storage.commit(name, record, target.claim, replace=target.overwrite)
        except NameTaken:
            message = (
                f"{target.where} holds a checkpoint already, saved meanwhile; nothing was changed"
            )
            raise StepExists(message, step=target.key.step, path=target.where) from None
        if replaced:
            # An incremental save links files of the step that it replaces: those stay.
            self._delete_replaced(replaced - set(parse_record(record, target.where).file_names()))
        return Committed()

    def _named_files(self) -> list[str]:
        """Returns the files that the record in place names; none where the record is damaged.

        What a damaged record named stays until somebody looks.
        """
        try:
            return read_record(self._target.timed_storage, self._target.folder).file_names()
        except CheckpointError:
            return []

    def _delete_replaced(self, names: set[str]) -> None:
        try:
            delete_files(self._target.timed_storage, self._target.folder, sorted(names))
        except OSError as error:  # the step is saved; a sweep finds them
            _log.warning("what %s was before could not be deleted: %s", self._target.where, error)

    def _read(self) -> Found:
        target = self._target
        self._settled_by_s = self._settled_by_s or time.monotonic() + LOOK_S
        storage = until(target.storage, max(target.end_s, self._settled_by_s))
        try:
            found = read_record(storage, target.folder).writer_id
        except StepNotFound:
            return RecordAbsent()
        if found != target.key.save_id or target.storage.posix is None:
            return RecordFound(found)
        # A kernel tells of a page that it could not write once, and then drops the page: a second
        # fsync that succeeds proves nothing.
        if self._is_unclear:
            return RecordFound(found, durable=False)
        target.storage.posix.make_durable(target.folder)
        return RecordFound(found)

    def delete_own(self) -> None:
        """Deletes what this process wrote, now or by the background worker."""
        target = self._target
        names = self._work.own_files()

        def delete(limit_s: float) -> None:
            storage = until(target.storage, time.monotonic() + limit_s)
            delete_files(storage, target.folder, names)

        try:
            delete(min(DELETE_S, target.timeout_s))
        except OSError as error:
            _log.warning(
                "the files of the failed save of %s could not be deleted yet: %s",
                target.where,
                error,
            )
            if target.worker is not None:
                # Its time once more. What stays then a sweep finds.
                target.worker.put(
                    f"deleting what is left of the failed save of {target.where}",
                    lambda: delete(target.timeout_s),
                )

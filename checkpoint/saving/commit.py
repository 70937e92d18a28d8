"""One save on one process: carries out what the protocol asks for. It takes the store, the group
and the clock that the protocol lacks.

A manager's save, a one-shot save and a conversion differ in the work alone: how packs are written,
and what the record is made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.coordination import BarrierTimeout, Fenced, ProcessLost
from holdfast.multihost import Group
from holdfast.multihost.group.group import SaveStage, runtime_indices

from ..agreement.save_protocol import (
    BuildRecord,
    Built,
    Commit,
    Committed,
    DecideSuperfluous,
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
from ..steps.step_files import delete_files
from ..storage.base import NameTaken, NotCommitted, Storage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .plan import Plan
from .plan_mismatch import PlansDiffer, explain, receive_result

_log = logging.getLogger(__name__)
RESULT_WAIT_S = 30.0  # what the primary's result may take beyond the save's own time
NAMED_LEAVES = 5  # of those that were lost


class Cancellation:
    """Calls a save off, until `close`. Thread-safe, without a lock that an interrupt could leave
    held: the first call decides.
    """

    def __init__(self) -> None:
        self._first: dict[None, str] = {}

    def cancel(self) -> bool:
        """Calls the save off; returns whether that came in time, so that nothing of it is or will
        be committed.
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
        """Lets no later `cancel` come in time: from here on others may commit. Raises SaveCancelled
        where the save was called off.
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
    reports_step: bool = False  # to the launcher, once it is saved
    worker: BackgroundWorker | None = (
        None  # for files that cannot be deleted yet; without it they are left to a sweep
    )
    began: float = field(default_factory=time.monotonic)
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def where(self) -> str:
        """The step's folder, as messages show it."""
        return join(self.storage.root, self.folder)

    @property
    def remaining_s(self) -> float:
        """The seconds that remain of the save's time."""
        return max(0.0, self.began + self.timeout_s - time.monotonic())

    def report(self, stage: SaveStage, **progress: int | str) -> None:
        """Reports to the launcher where this process's part stands."""
        self.group.report(save=self.key.counter, save_stage=stage, **progress)


class SaveWork(Protocol):
    """What kinds of saves differ in."""

    def write(self) -> Mapping[str, ItemReport]:
        """Writes this process's share, durably; reports it."""

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record, at the primary. Raises SaveFailed where the reports do not fit
        together.
        """

    def check(self, record: bytes) -> None:
        """Reads what `build` has built as every reader will. Raises HostileCheckpoint, Corrupt."""

    def plans(self) -> Mapping[str, Plan]:
        """Returns the plans of the items, to be explained where processes differ."""

    def own_files(self) -> list[str]:
        """Returns the files that this process writes, by names relative to the step's folder."""

    def steps_crc(self) -> int:
        """Returns what tells the steps that this process knows from others."""

    def superfluous(self, *, list_steps: bool) -> Superfluous:
        """Returns what the save makes superfluous, at the primary, once it is committed."""


def run_protocol(target: SaveTarget, work: SaveWork) -> SaveResult:
    """Saves, with all processes of the group. Blocks for the save's time and RESULT_WAIT_S at most;
    a failure is in the result.

    Where nothing can be committed any more, what this process wrote is deleted.
    """
    result: SaveResult | None = None
    try:
        result = _run(_Part(target, work), target)
        return result
    finally:
        is_saved = target.reports_step and result is not None and result.error is None
        saved: dict[str, int | str] = (
            {"saved_step": target.key.step, "trouble": ""} if is_saved else {}
        )
        target.report(
            SaveStage.SETTLED, **saved
        )  # in one report: a launcher may end a process that is settled


def _run(performer: _Part, target: SaveTarget) -> SaveResult:
    group = target.group
    writers = range(group.count)
    try:
        result = drive(
            (
                lead(target.key, writers)
                if group.index == 0
                else follow(target.key, group.index, writers)
            ),
            performer.perform,
        )
    except BaseException:
        if not performer.reported:  # nobody can commit without it
            performer.delete_own()
        raise
    if result.error is not None:
        if performer.own_error is not result.error:
            result.error.__cause__ = performer.own_error or result.error.__cause__
        if result.deletable:
            performer.delete_own()
    return result


class _Part:
    """Carries out the effects of one process's part."""

    def __init__(self, target: SaveTarget, work: SaveWork) -> None:
        self._target = target
        self._work = work
        self.own_error: Exception | None = None
        self.reported = self._unclear = False

    def perform(self, effect: Effect) -> Event:
        """Answers an effect. Whatever goes wrong is an answer too; what ends the process (Ctrl-C in
        a one-shot save) is raised.
        """
        try:
            return self._perform(effect)
        except Exception as error:
            self.own_error = self.own_error or error
            if isinstance(effect, Commit):
                self._unclear = True
                return Unclear(error)
            if isinstance(effect, ReadRecord):
                return RecordUnreadable()
            if isinstance(
                effect, Tell | DecideSuperfluous
            ):  # the step is saved all the same, or not
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
            case DecideSuperfluous(list_steps):
                return self._work.superfluous(list_steps=list_steps)
            case Tell(result):
                self._target.group.broadcast(
                    f"{self._target.messages}/outcome",
                    result.to_bytes(),
                    timeout_s=self._result_wait_s,
                )
                return None
            case Hear():
                return Heard(
                    receive_result(
                        self._target.group,
                        self._target.messages,
                        self._work.plans(),
                        self._result_wait_s,
                    )
                )

    def _prepare(self) -> Event:
        target, items = self._target, self._work.write()
        if target.group.index:  # the next it says is its report
            target.cancellation.close(target.key.step, target.group.index)
        return Prepared(items, self._work.steps_crc())

    @property
    def _result_wait_s(self) -> float:
        return self._target.remaining_s + RESULT_WAIT_S

    def _gather(self, report: SaveReport) -> Event:
        self.reported = True
        self._target.report(
            SaveStage.REPORTED
        )  # before it is: a launcher may end those that wait for one which has not
        timeout_s = self._target.remaining_s or 0.001
        try:
            gathered = self._target.group.gather(
                f"{self._target.messages}/report", report.to_bytes(), timeout_s=timeout_s
            )
        except (BarrierTimeout, ProcessLost) as error:
            if self._target.group.index:  # the primary may have all reports nevertheless
                raise
            raise self._with_lost_leaves(error) from error
        return (
            Sent()
            if gathered is None
            else Gathered([SaveReport.from_bytes(data) for data in gathered])
        )

    def _with_lost_leaves(self, error: BarrierTimeout | ProcessLost) -> Exception:
        """Returns the failure of the save, with the leaves that went with the processes that did
        not report, for all to hear.
        """
        group, failure = self._target.group, failure_of(error, self._target.key.step, 0)
        missing = error.missing if isinstance(error, BarrierTimeout) else (error.process,)
        ranks = [rank for rank, process in enumerate(runtime_indices(group)) if process in missing]
        lost = sorted(
            {
                path
                for plan in self._work.plans().values()
                for rank in ranks
                for path in plan.held_only_by(rank)
            }
        )
        if not lost:
            return failure
        more = f" and {len(lost) - NAMED_LEAVES} more" if len(lost) > NAMED_LEAVES else ""
        message = f"{failure}; nobody else held all of {', '.join(lost[:NAMED_LEAVES])}{more}"
        return SaveFailed(
            message, step=self._target.key.step, process=getattr(failure, "process", None)
        )

    def _build(self, reports: Sequence[SaveReport]) -> Event:
        try:
            return Built(self._work.build(reports))
        except PlansDiffer as error:
            return Failed(
                explain(
                    self._target.group,
                    self._target.messages,
                    error,
                    self._work.plans().get(error.item),
                )
            )

    def _commit(self, record: bytes) -> Event:
        """Makes the step exist, in one atomic operation."""
        target, name = self._target, join(self._target.folder, RECORD_NAME)
        if not target.remaining_s:
            message = (
                f"step {target.key.step} was not saved: it took longer than"
                f" save_timeout_s={target.timeout_s:g}"
            )
            return Refused(SaveFailed(message, step=target.key.step))
        target.report(SaveStage.COMMITTING)
        replaced = set(_named_files(target)) if target.overwrite else set()
        try:
            target.cancellation.close(target.key.step, target.group.index)
            target.storage.commit(name, record, target.claim, replace=target.overwrite)
        except NameTaken:
            message = (
                f"{target.where} holds a checkpoint already, saved by another writer meanwhile;"
                " nothing was changed"
            )
            return Refused(StepExists(message, step=target.key.step, path=target.where))
        except (NotCommitted, Fenced, SaveCancelled) as error:
            return Refused(error)
        if replaced:
            self._delete_replaced(replaced - set(parse_record(record, target.where).file_names()))
        return Committed()

    def _delete_replaced(self, names: set[str]) -> None:
        try:
            delete_files(self._target.storage, self._target.folder, sorted(names))
        except OSError as error:  # the step is saved; a sweep finds them
            _log.warning("what %s was before could not be deleted: %s", self._target.where, error)

    def _read(self) -> Found:
        target = self._target
        try:
            found = read_record(target.storage, target.folder).writer_id
        except StepNotFound:
            return RecordAbsent()
        if found != target.key.save_id or target.storage.posix is None:
            return RecordFound(found)
        # a disk that failed to make it durable once does not always fail again, and it is no more
        # durable then
        if self._unclear:
            return RecordFound(found, durable=False)
        target.storage.posix.make_durable(target.folder)
        return RecordFound(found)

    def delete_own(self) -> None:
        """Deletes what this process wrote; what cannot be deleted now is left to the background
        worker.
        """
        target, names = self._target, self._work.own_files()

        def delete() -> None:
            delete_files(target.storage, target.folder, names)

        try:
            delete()
        except OSError as error:
            _log.warning(
                "the files of the failed save of %s could not be deleted yet: %s",
                target.where,
                error,
            )
            if target.worker is not None:
                target.worker.put(
                    f"deleting what is left of the failed save of {target.where}", delete
                )


def _named_files(target: SaveTarget) -> list[str]:
    """Returns the files that the record in place names; none where it is damaged: what it named
    stays until somebody looks.
    """
    try:
        return read_record(target.storage, target.folder).file_names()
    except CheckpointError:
        return []

"""One save, in the background: write, agree, commit, tell.

Every process walks through the same two messages whatever happens to it: a gather of reports, and a broadcast of how it ended. A process
that cannot save says so in its report; the primary alone commits; whoever hears nothing reads the record.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.coordination import Fenced, HoldfastError
from holdfast.multihost import Group

from ..errors import CheckpointError, CommitUnknown, SaveFailed, StepExists, StepNotFound, describe, failure_of
from ..format.record import Record, read_record
from ..steps.claims import FOLDER
from ..steps.garbage import delete_files, delete_own
from ..storage.base import Storage
from ..storage.local import LocalStorage, fenced
from ..storage.tombstone import RECORD_NAME
from .pack_writer import write_json, write_snapshot
from .plan import Plan
from .plan_mismatch import PlansDiffer, check_reports, explain, hear
from .protocol import Outcome, SaveReport, check
from .record_builder import build_record
from .snapshot import Snapshot

_log = logging.getLogger(__name__)
NAMES = 64  # saves take turns at this many names: a process that is late for one save never meets the others in the next
TELL_S = 30.0  # what the primary's answer may take beyond the save's own time
SPARE_BYTES = 1 << 20  # for headers, the record and folders, when free space is checked


@dataclass(frozen=True)
class SaveContext:
    """What all saves of a manager share. `letting_go` says, at the primary, which steps a committed save makes superfluous."""

    storage: Storage
    group: Group
    writer_id: str
    save_timeout_s: float
    check_free_space: bool
    letting_go: Callable[[SaveRequest], list[int]]

    @property
    def claim(self) -> str:
        """Is the folder of the claim."""
        return f"{FOLDER}/{self.writer_id}"

    def name(self, counter: int) -> str:
        """Returns what the names of a save's messages begin with."""
        return f"checkpoint/{self.writer_id}/{counter % NAMES}"


@dataclass
class SaveRequest:
    """One save of one process. `trees` and `values` are its items; `broken` says why this process cannot take part."""

    counter: int
    step: int
    tag: str
    overwrite: bool = False
    trees: dict[str, tuple[Plan, Snapshot]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Any = None
    broken: Exception | None = None
    started_s: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    error: HoldfastError | None = None
    leftovers: Callable[[], None] | None = None

    @property
    def total_bytes(self) -> int:
        """Is what all processes write of the trees."""
        return sum(plan.total_bytes for plan, _ in self.trees.values())

    @property
    def own_bytes(self) -> int:
        """Is what this process writes of the trees."""
        return sum(plan.own_bytes for plan, _ in self.trees.values())

    def left_s(self, desk: SaveContext) -> float:
        """Returns the seconds left of the save's time."""
        return max(0.0, self.began + desk.save_timeout_s - time.monotonic())


def run(save: SaveRequest, desk: SaveContext, progress: Callable[[int], None] | None = None) -> tuple[int, ...]:
    """Does the whole save, sets its `error`, never raises; returns the steps to let go. Blocks for the save's time and TELL_S."""
    outcome = Outcome(save.step)
    try:
        report, own_error = _write(save, desk, progress)
        outcome = _decide(save, desk, report) if desk.group.index == 0 else _follow(save, desk, report)
        save.error = outcome.error
        if save.error is not None:
            save.error.__cause__ = own_error or save.error.__cause__
            if not isinstance(save.error, CommitUnknown):
                _clean(save, desk)
    except Exception as error:  # whatever it is, the caller hears of it at its next call
        save.error = failure_of(error, save.step, desk.group.index)
        save.error.__cause__ = error
    finally:
        for _, snapshot in save.trees.values():
            snapshot.release()
        save.ended = time.monotonic()
    return outcome.gone


def _write(save: SaveRequest, desk: SaveContext, progress: Callable[[int], None] | None) -> tuple[SaveReport, Exception | None]:
    """Writes this process's part; returns its report, or one that says why there is none."""
    index = desk.group.index
    try:
        if save.broken is not None:
            raise save.broken
        _check_space(save, desk)
        items = {}
        for name, (_, snapshot) in save.trees.items():
            items[name] = write_snapshot(snapshot, desk.storage, str(save.step), name, save.tag, progress=progress)
        for name, value in save.values.items():
            items[name] = write_json(desk.storage, str(save.step), name, save.tag, index, value)
        return SaveReport(index, save.counter, save.step, items), None
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not desk.storage.list(desk.claim):
            error = fenced(f"{desk.storage.root}/{desk.claim}")  # and what it was writing has been swept
        text = error.message if isinstance(error, StepExists | Fenced) else describe(error)
        return SaveReport(index, save.counter, save.step, error=text, kind=type(error).__name__), error


def _check_space(save: SaveRequest, desk: SaveContext) -> None:
    """Refuses, at the primary and before a byte is written, a save that the disk has no room for."""
    if not desk.check_free_space or desk.group.index or not isinstance(desk.storage, LocalStorage):
        return
    need, free = save.total_bytes + SPARE_BYTES, shutil.disk_usage(desk.storage.root).free
    if need > free:
        raise OSError(28, f"step {save.step} needs {need:,} bytes, {free:,} are free; delete old steps or keep fewer", desk.storage.root)


def _decide(save: SaveRequest, desk: SaveContext, report: SaveReport) -> Outcome:
    """Is the primary's part: gathers, commits, and tells all how it ended."""
    try:
        gathered = desk.group.gather(f"{desk.name(save.counter)}/report", report.to_bytes(), timeout_s=save.left_s(desk) or 0.001)
        assert gathered is not None
        _commit(save, desk, [SaveReport.from_bytes(data) for data in gathered])
        outcome = Outcome(save.step, None, _superfluous(save, desk))
    except PlansDiffer as error:
        plan = save.trees[error.item][0]
        outcome = Outcome(save.step, explain(desk.group, desk.name(save.counter), error, plan))
    except Exception as error:
        outcome = Outcome(save.step, failure_of(error, save.step, 0))
    try:
        desk.group.broadcast(f"{desk.name(save.counter)}/outcome", outcome.to_bytes(), timeout_s=save.left_s(desk) + TELL_S)
    except HoldfastError as error:  # they read the record
        _log.warning("how the save of step %d ended could not be told to the other processes: %s", save.step, error)
    return outcome


def _superfluous(save: SaveRequest, desk: SaveContext) -> tuple[int, ...]:
    try:
        return tuple(desk.letting_go(save))
    except Exception as error:  # the step is saved; what should go may go after the next save
        _log.warning("which steps to delete after step %d could not be decided: %s", save.step, error)
        return ()


def _follow(save: SaveRequest, desk: SaveContext, report: SaveReport) -> Outcome:
    """Is the part of all others: reports, and hears how it ended; who hears nothing reads the record."""
    lost: HoldfastError | None = None
    try:
        desk.group.gather(f"{desk.name(save.counter)}/report", report.to_bytes(), timeout_s=save.left_s(desk) or 0.001)
    except HoldfastError as error:
        lost = error
    try:
        plans = {name: plan for name, (plan, _) in save.trees.items()}
        return Outcome.from_bytes(hear(desk.group, desk.name(save.counter), plans, save.left_s(desk) + TELL_S))
    except HoldfastError as error:
        return _settle(save, desk, lost or error)


def _settle(save: SaveRequest, desk: SaveContext, error: HoldfastError) -> Outcome:
    """Reads the record: if it is this save's, the save is committed; else nobody here can know."""
    if _is_ours(save, desk):
        return Outcome(save.step)
    unknown = CommitUnknown(
        f"whether step {save.step} was saved is not known here: {error}. It may yet appear, whole or not at all; "
        "the next manager that is opened knows",
        step=save.step,
        path=desk.storage.root,
    )
    unknown.__cause__ = error
    return Outcome(save.step, unknown)


def _is_ours(save: SaveRequest, desk: SaveContext) -> bool:
    try:
        return read_record(desk.storage, str(save.step)).writer_id == save.tag
    except (CheckpointError, OSError):
        return False


def _commit(save: SaveRequest, desk: SaveContext, reports: list[SaveReport]) -> None:
    """Checks the reports and makes the step exist, in one atomic operation."""
    check(reports, save.counter, save.step)
    items: dict[str, tuple[Plan | None, list[Any]]] = {}
    for name in [*save.trees, *save.values]:
        plan = save.trees[name][0] if name in save.trees else None
        parts = [report.items[name] for report in reports]
        if plan is not None:
            check_reports(name, plan, parts)
        items[name] = (plan, parts)
    record = build_record(
        save.step,
        items,
        writer=save.tag,
        processes=desk.group.count,
        started_s=save.started_s,
        finished_s=time.time(),
        metrics=save.metrics,
        metadata=save.metadata,
    )
    old = _old_record(save, desk) if save.overwrite else None
    if not save.left_s(desk):
        raise SaveFailed(f"step {save.step} was not saved: it took longer than save_timeout_s={desk.save_timeout_s:g}", step=save.step)
    _publish(save, desk, record)
    if old is not None:
        kept = {f"{name}/{file.name}" for name, (_, parts) in items.items() for part in parts for file in part.files}
        try:
            delete_files(desk.storage, save.step, sorted(set(old.file_names()) - kept))
        except OSError as error:  # the step is saved; the next sweep finds them
            _log.warning("what step %d was before could not be deleted: %s", save.step, error)


def _publish(save: SaveRequest, desk: SaveContext, record: bytes) -> None:
    name = f"{save.step}/{RECORD_NAME}"
    try:
        desk.storage.commit(name, record, desk.claim, replace=save.overwrite)
    except FileExistsError:
        raise StepExists(
            f"step {save.step} is already in {desk.storage.root}, saved by another writer meanwhile; nothing was changed",
            step=save.step,
            path=desk.storage.root,
        ) from None
    except OSError as error:
        if not _is_ours(save, desk):
            raise
        raise CommitUnknown(
            f"step {save.step} has its record in {desk.storage.root}, but whether it is durable is not known: {error}",
            step=save.step,
            path=desk.storage.root,
        ) from error


def _old_record(save: SaveRequest, desk: SaveContext) -> Record | None:
    try:
        return read_record(desk.storage, str(save.step))
    except StepNotFound:
        return None
    except CheckpointError:
        return None  # damaged: what it named stays until somebody looks


def _clean(save: SaveRequest, desk: SaveContext) -> None:
    """Deletes what this process wrote; what cannot be deleted now is left for later."""
    items = [*save.trees, *save.values]

    def delete() -> None:
        delete_own(desk.storage, save.step, items, desk.group.index, save.tag)

    try:
        delete()
    except OSError as error:
        save.leftovers = delete
        _log.warning("the files of the failed save of step %d could not be deleted yet: %s", save.step, error)

"""The one agreement of a save, without I/O, threads or clocks: its messages, and what primary and
followers do, step by step.

`lead` and `follow` are generators. Each yields an effect and is sent the event that answers it;
what it returns is how the save ended. `drive` runs one with a function that carries effects out. A
manager's save, a one-shot save and a conversion all run these, and so does the simulator.

    primary   Prepare > Gather > BuildRecord > ParseRecord > Commit (> ReadRecord, when the answer
    is unclear) > DecideSuperfluous > Tell follower  Prepare > Gather > Hear (> ReadRecord, when
    nothing was heard)

The rules:
- A report means durable: a process that dies after it does not stop the commit. Every process
  reports in every save, its error if it has one, so that the saves of all stay in step; the first
  process that failed is named to all.
- Every message names its save. One of another save is not believed.
- Only the primary commits, once, and only a record that parses.
- An answer that did not come is neither yes nor no. An unclear commit is settled by reading the
  record: this save's, and durable, is a commit; all else is CommitUnknown. A record that cannot be
  read is nobody's.
- Packs may be deleted by those who wrote them only if their record cannot come to exist: the commit
  was never tried, or was refused for certain. All other packs are a sweep's, once the claim is
  fenced: a late commit may still land, even where another's record was read meanwhile, since that
  may be deleted first.
- Whoever reported that it failed knows without another word that nothing is committed: the commit
  needs its share.
- A save is called off by a failure: in the report of a process with a share, or at the primary in
  place of the commit. After its report, or once it has begun to commit, a process cannot call it
  off any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeGuard

from holdfast.coordination import Fenced, HoldfastError

from ..errors import (
    CommitUnknown,
    SaveCancelled,
    SaveFailed,
    StepExists,
    error_from_message,
    error_text,
    error_to_message,
    failure_of,
)
from ..format.item_report import ItemReport

READ_TRIES = 3  # of a record that settles what is not known


@dataclass(frozen=True)
class SaveKey:
    """Names one save of one writer: `save_id` is the writer's id and the counter, which is the same
    on all processes.
    """

    save_id: str
    counter: int
    step: int

    def to_json(self) -> list[Any]:
        return [self.save_id, self.counter, self.step]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> SaveKey:
        return cls(*data)


@dataclass(frozen=True)
class SaveReport:
    """What one process reports to the primary of its share in a save: items with their files, or
    its error.

    `steps` is the CRC of the steps that it knows: where one differs from the primary's, all are
    told the list.
    """

    process: int
    key: SaveKey
    items: Mapping[str, ItemReport] = field(default_factory=dict)
    steps: int = 0
    error: str = ""
    kind: str = ""

    @classmethod
    def of_error(cls, process: int, key: SaveKey, error: Exception) -> SaveReport:
        """Returns the report of a process that cannot save; where it has no share in what is wrong,
        the message says it all.
        """
        text = (
            error.message
            if isinstance(error, StepExists | Fenced | SaveCancelled)
            else error_text(error)
        )
        return cls(process, key, error=text, kind=type(error).__name__)

    def to_bytes(self) -> bytes:
        """Returns compact JSON."""
        items = {name: report.to_json() for name, report in self.items.items()}
        body = [self.process, self.key.to_json(), items, self.steps, self.error, self.kind]
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveReport:
        """Reads what `to_bytes` wrote."""
        process, key, items, steps, error, kind = json.loads(data)
        reports = {name: ItemReport.from_json(report) for name, report in items.items()}
        return cls(process, SaveKey.from_json(key), reports, steps, error, kind)


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, alike on all processes: committed, with the steps that it makes
    superfluous, or the error.

    `deletable` says that the record cannot come to exist, so that each process may delete what it
    wrote. `steps` are those that the primary knows, before this save; None where all know the same.
    """

    key: SaveKey
    error: HoldfastError | None = None
    deletable: bool = False
    superfluous: tuple[int, ...] = ()
    steps: tuple[int, ...] | None = None

    def to_bytes(self) -> bytes:
        """Returns compact JSON."""
        error = None if self.error is None else error_to_message(self.error)
        return json.dumps(
            [self.key.to_json(), error, self.deletable, self.superfluous, self.steps]
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveResult:
        """Reads what `to_bytes` wrote."""
        key, error, deletable, superfluous, steps = json.loads(data)
        known = None if steps is None else tuple(steps)
        return cls(
            SaveKey.from_json(key),
            None if error is None else error_from_message(*error),
            deletable,
            tuple(superfluous),
            known,
        )


# --- what a process asks of its surroundings; each says which event answers it


@dataclass(frozen=True)
class Prepare:
    """Write this process's share, durably: Prepared or Failed."""


@dataclass(frozen=True)
class Gather:
    """Send the report to the primary: Gathered at the primary, Sent elsewhere, or Failed."""

    report: SaveReport


@dataclass(frozen=True)
class BuildRecord:
    """Make the record of these reports: Built, or Failed where they do not fit together."""

    reports: Sequence[SaveReport]


@dataclass(frozen=True)
class ParseRecord:
    """Read the record as a reader will: Parsed or Failed."""

    record: bytes


@dataclass(frozen=True)
class Commit:
    """Give the record its name, if there is time: Committed, Refused, Unclear."""

    record: bytes


@dataclass(frozen=True)
class ReadRecord:
    """Look who has committed: RecordFound, RecordAbsent, RecordUnreadable."""


@dataclass(frozen=True)
class DecideSuperfluous:
    """Say which steps the keep policy lets go now, and with `list_steps` which there are:
    Superfluous.
    """

    list_steps: bool


@dataclass(frozen=True)
class Tell:
    """Send the result to all: any event; who hears nothing reads the record."""

    result: SaveResult


@dataclass(frozen=True)
class Hear:
    """Wait for the primary's result: Heard or Failed."""


Effect: TypeAlias = (
    Prepare
    | Gather
    | BuildRecord
    | ParseRecord
    | Commit
    | ReadRecord
    | DecideSuperfluous
    | Tell
    | Hear
)

# --- what comes back


@dataclass(frozen=True)
class Prepared:
    """Says that this process's share is durable."""

    items: Mapping[str, ItemReport]
    steps: int = 0


@dataclass(frozen=True)
class Gathered:
    """Brings the reports of all processes, or of those that there still are."""

    reports: Sequence[SaveReport]


@dataclass(frozen=True)
class Sent:
    """Says that the primary has this process's report."""


@dataclass(frozen=True)
class Built:
    """Brings the record."""

    record: bytes


@dataclass(frozen=True)
class Parsed:
    """Says that the record is one that readers take."""


@dataclass(frozen=True)
class Committed:
    """Says that the record has its name, durably."""


@dataclass(frozen=True)
class Refused:
    """Says that the record does not have its name, and never will."""

    error: Exception


@dataclass(frozen=True)
class Unclear:
    """Says that the record may have its name, now or later."""

    error: Exception


@dataclass(frozen=True)
class RecordFound:
    """Says whose record is there, and whether it is known to outlive a power cut."""

    save_id: str
    durable: bool = True


@dataclass(frozen=True)
class RecordAbsent:
    """Says that there is no record, now."""


@dataclass(frozen=True)
class RecordUnreadable:
    """Says that whose record it is, if there is one, cannot be told."""


@dataclass(frozen=True)
class Superfluous:
    """Brings the steps that go, and those that there are (None: not asked)."""

    superfluous: tuple[int, ...] = ()
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Heard:
    """Brings the primary's result."""

    result: SaveResult


@dataclass(frozen=True)
class Failed:
    """Says that it could not be done, or that the save is called off (a cancel is a failure that
    comes before the commit).
    """

    error: Exception


Found: TypeAlias = RecordFound | RecordAbsent | RecordUnreadable
Event: TypeAlias = (
    Prepared
    | Gathered
    | Sent
    | Built
    | Parsed
    | Committed
    | Refused
    | Unclear
    | Found
    | Superfluous
    | Heard
    | Failed
    | None
)
Saving: TypeAlias = Generator[Effect, Event, SaveResult]


def drive(saving: Saving, perform: Callable[[Effect], Event]) -> SaveResult:
    """Runs one process's part of a save: `perform` carries an effect out, and raises nothing that
    is an answer.
    """
    event: Event = None
    while True:
        try:
            effect = saving.send(event)
        except StopIteration as end:
            result: SaveResult = end.value
            return result
        event = perform(effect)


# --- the primary


def lead(key: SaveKey, writers: Collection[int]) -> Saving:
    """Does the primary's part (rank 0). `writers` are the ranks whose shares the record needs."""
    own = yield from _report(key, 0)
    gathered = yield Gather(own)
    reports = gathered.reports if isinstance(gathered, Gathered) else []
    result = (
        (yield from _commit(key, reports, writers))
        if isinstance(gathered, Gathered)
        else _not_committed(key, _error(gathered))
    )
    if result.error is None:
        decided = yield DecideSuperfluous(any(report.steps != own.steps for report in reports))
        if isinstance(decided, Superfluous):
            result = replace(result, superfluous=decided.superfluous, steps=decided.steps)
    yield Tell(result)
    return result


def _commit(key: SaveKey, reports: Sequence[SaveReport], writers: Collection[int]) -> Saving:
    try:
        check_save_reports(reports, key, writers)
    except HoldfastError as error:
        return _not_committed(key, error)
    built = yield BuildRecord(reports)
    if not isinstance(built, Built):
        return _not_committed(key, _error(built))
    parsed = yield ParseRecord(built.record)
    if not isinstance(parsed, Parsed):
        return _not_committed(key, _error(parsed))
    answer = yield Commit(built.record)
    if isinstance(answer, Committed):
        return SaveResult(key)
    if isinstance(answer, Refused):
        return _not_committed(key, answer.error)
    assert isinstance(answer, Unclear)
    return settle(key, answer, (yield from _read()))


def settle(key: SaveKey, answer: Unclear, found: Found) -> SaveResult:
    """Returns what the primary knows after an unclear answer and a look at the record. Nothing may
    be deleted, whatever it is.
    """
    if not is_ours(found, key):
        return _unknown(
            key, f"whether its record is there, or will be, is not known after: {answer.error}"
        )
    if not found.durable:
        return _unknown(
            key,
            f"its record is there, but whether that is durable is not known after: {answer.error}",
        )
    return SaveResult(key)


def check_save_reports(
    reports: Sequence[SaveReport], key: SaveKey, writers: Collection[int]
) -> None:
    """Raises the save's error when a process that writes failed, or is at another save, step or set
    of items than the primary (rank 0).
    """
    for report in reports:
        if not fits(report.key, key):
            other = report.key
            raise SaveFailed(
                f"step {key.step} was not saved: process {report.process} is at its save"
                f" {other.counter} of step {other.step}, the primary at its save {key.counter} of"
                f" step {key.step}; every process has to save the same steps in the same order"
                + (f". It failed: {report.error}" if report.error else ""),
                step=key.step,
                process=report.process,
            )
    shares = [report for report in reports if report.process in writers]
    for report in shares:
        if report.error:
            raise reported_error(report)
    missing = sorted(set(writers) - {report.process for report in shares})
    if missing:
        message = (
            f"step {key.step} was not saved: there is no report of process {missing[0]}, which has"
            " a share in it"
        )
        raise SaveFailed(message, step=key.step, process=missing[0])
    for report in shares:
        if set(report.items) != set(shares[0].items):
            raise SaveFailed(
                f"step {key.step} was not saved: process {report.process} saves the items"
                f" {sorted(report.items)}, the primary {sorted(shares[0].items)}; expected the same"
                " items on every process",
                step=key.step,
                process=report.process,
            )


def reported_error(report: SaveReport) -> HoldfastError:
    """Returns what all processes raise of the one whose report has an error."""
    step = report.key.step
    process = report.process
    match report.kind:
        case "StepExists":
            return StepExists(report.error, step=step)
        case "Fenced":
            return Fenced(report.error)
        case "SaveCancelled":
            return SaveCancelled(report.error, step=step, process=process)
    return SaveFailed(
        f"step {step} was not saved: process {process} failed: {report.error}",
        step=step,
        process=process,
    )


# --- the others


def follow(key: SaveKey, process: int, writers: Collection[int]) -> Saving:
    """Does the part of every other process."""
    report = yield from _report(key, process)
    sent = yield Gather(report)
    heard = yield Hear()
    if isinstance(heard, Heard) and fits(heard.result.key, key):
        return heard.result
    if knows_failure(report, writers):
        return _not_committed(key, reported_error(report))
    why = next(
        (event.error for event in (sent, heard) if isinstance(event, Failed)),
        "what came was of another save",
    )
    return unheard(key, (yield from _read()), f"process {process} was not told how it ended: {why}")


def knows_failure(report: SaveReport, writers: Collection[int]) -> bool:
    """Says whether a process knows by its own report that nothing is committed."""
    return bool(report.error) and report.process in writers


def unheard(key: SaveKey, found: Found, why: str) -> SaveResult:
    """Returns what a process knows that heard nothing of its save, by the record."""
    return SaveResult(key) if is_ours(found, key) and found.durable else _unknown(key, why)


# --- what both do


def fits(found: SaveKey, key: SaveKey) -> bool:
    """Says whether a message is of this save."""
    return found == key


def is_ours(found: Found, key: SaveKey) -> TypeGuard[RecordFound]:
    """Says whether the record that was found is this save's."""
    return isinstance(found, RecordFound) and found.save_id == key.save_id


def _report(key: SaveKey, process: int) -> Generator[Effect, Event, SaveReport]:
    prepared = yield Prepare()
    if isinstance(prepared, Prepared):
        return SaveReport(process, key, prepared.items, prepared.steps)
    return SaveReport.of_error(process, key, _error(prepared))


def _read() -> Generator[Effect, Event, Found]:
    found: Event = RecordUnreadable()
    for _ in range(READ_TRIES):
        found = yield ReadRecord()
        if not isinstance(found, RecordUnreadable):
            break
    assert isinstance(found, RecordFound | RecordAbsent | RecordUnreadable)
    return found


def _not_committed(key: SaveKey, error: Exception) -> SaveResult:
    return SaveResult(key, failure_of(error, key.step, 0), deletable=True)


def _unknown(key: SaveKey, why: str) -> SaveResult:
    message = (
        f"whether step {key.step} was saved is not known: {why}. It may yet appear, whole or not at"
        " all; the next manager knows"
    )
    return SaveResult(key, CommitUnknown(message, step=key.step))


def _error(event: Event) -> Exception:
    assert isinstance(event, Failed), event
    return event.error

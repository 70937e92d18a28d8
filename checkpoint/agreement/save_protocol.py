"""The one agreement of a save, without I/O, threads or clocks: its messages, and what primary and
followers do, step by step.

`lead` and `follow` are generators. Each yields an effect and is sent the event that answers it;
what it returns is how the save ended. `drive` runs one with a function that carries effects out. A
manager's save, a one-shot save, a conversion and a save onto the hosts run them, and the simulator.

    primary     Prepare > Gather > BuildRecord > Commit (> ReadRecord, when the answer is unclear)
                > DeleteSuperfluous > Tell
    follower    Prepare > Gather > Hear (> ReadRecord, when nothing was heard)

The rules:
- A report means durable: a process that dies after it does not stop the commit. Every process
  reports in every save, its error if it has one, so that the saves of all stay in step; the first
  process that failed is named to all.
- Every message names its save. A message of another save is not believed.
- Only the primary commits, once, and only a record that parses.
- An answer that did not come is neither yes nor no. An unclear commit is settled by reading the
  record: this save's, and durable, is a commit; all else is CommitUnknown. A record that cannot be
  read is nobody's.
- Packs may be deleted by those who wrote them only if their record cannot come to exist: the commit
  was never tried, or was refused for certain. All other packs are a sweep's, once the claim is
  fenced: a late commit may still land, even where another's record was read meanwhile, since that
  may be deleted first.
- Every process has a share, which the record needs. One that reported its failure knows without
  another word that nothing is committed.
- A save is called off by a failure: in the report of a process, or at the primary in place of the
  commit. After its report, or once it has begun to commit, a process cannot call it
  off any more.
- A failure that passes may be a miss, which no process raises: the primary decides so, and tells
  it. A process that was not told raises, and so does a primary that could not tell it.

The rules of a local save:
- A commit only ends the time in which a save can be called off: there is
  no record to read, and the parts alone show that the step is there.
- Only an outcome that was told makes a part deletable. A process that did not hear the outcome,
  and a primary that could not tell it, do not know it. Such a process is unsure: it deletes
  nothing, not even the older local step, until the next survey.
- The report of an unsure process says so. The primary then has all survey after this save.
- A process whose peer gave its part up has failed too (PartGivenUp). The peer's own error is the
  cause, and comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeGuard, TypeVar

from holdfast.coordination import HoldfastError

from ..errors import CheckpointError, CommitUnknown, SaveFailed, StepExists, failure_of
from ..format.item_report import ItemReport
from .exchange import first_failed
from .messages import Message, SentError
from .replica_sums import ReplicaQuestion, ReplicaReport

READ_TRIES = 3  # of a record that settles what is not known


# What all processes raise as the process raised it that failed. All else is a SaveFailed.
_RAISED_ALIKE = ("StepExists", "StepOutOfOrder", "Fenced", "SaveCancelled")


class TierTooLarge(CheckpointError):
    """Says that a local save would take more than `max_bytes`; it ends the tier."""


class PartGivenUp(CheckpointError):
    """Says that a peer could not save its own part; why it could not, it reports itself."""


@dataclass(frozen=True)
class SaveKey:
    """Names one save of one writer.

    `save_id` is the writer's id and the counter, which is the same on all processes.
    """

    save_id: str
    counter: int
    step: int


@dataclass(frozen=True)
class BranchStart:
    """The number of the branch that a save belongs to, and the step that the branch goes on from:
    see `steps.lineage`.
    """

    number: int
    base: int


@dataclass(frozen=True)
class SaveReport(Message):
    """What one process reports to the primary of its share in a save: its items, or its error.

    `steps` is the CRC of the steps that it knows: where one differs from the primary's, all are
    told the list. `replicas` is by item. `is_unsure`: it does not know how an earlier local save
    ended.
    """

    process: int
    key: SaveKey
    items: Mapping[str, ItemReport] = field(default_factory=dict)
    steps: int = 0
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    error: SentError | None = None
    is_unsure: bool = False


@dataclass(frozen=True)
class Superfluous:
    """Brings what a commit has made of the root: the steps that the primary has deleted,
    `superfluous`; `steps`, those that it knows then, without this save's, and `left_behind`, those
    that were (None: all know the same); and the save's branch, whose left local steps do not come
    back.
    """

    superfluous: tuple[int, ...] = ()
    steps: tuple[int, ...] | None = None
    left_behind: tuple[int, ...] | None = None
    branch: BranchStart | None = None


@dataclass(frozen=True)
class SaveResult(Message):
    """How a save ended, alike on all processes: committed, or the error.

    `deletable` says that the record cannot come to exist, so that each process may delete what it
    wrote; `is_there` that another save of the step is there. `after` is what a commit has made of
    the root. `drift` says which replicas differ in a step that was committed nevertheless. `missed`
    is above 0 where the error is a miss: how many there are in a row, with this one. Of a local
    save, `survey` asks all processes to find out together what there is, and `lane_off` is why no
    more local saves are made.
    """

    key: SaveKey
    error: HoldfastError | None = None
    deletable: bool = False
    is_there: bool = False
    after: Superfluous = Superfluous()
    drift: str = ""
    missed: int = 0
    survey: bool = False
    lane_off: str = ""

    @property
    def is_unclear(self) -> bool:
        """Whether it is not known how the save ended."""
        return isinstance(self.error, CommitUnknown)


@dataclass(frozen=True)
class LeafQuestion:
    """Asks one process for its leaves of an item."""

    process: int
    item: str


@dataclass(frozen=True)
class Told(Message):
    """What the primary tells all at the end of a save: the result, or a question before it."""

    result: SaveResult | None = None
    leaves_of: LeafQuestion | None = None
    replicas_of: ReplicaQuestion | None = None


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
    """Make the record of these reports, and read it as a reader will: Built, or Failed where they
    do not fit together, or no reader takes it.
    """

    reports: Sequence[SaveReport]


@dataclass(frozen=True)
class Commit:
    """Give the record its name, if there is time: Committed, Refused, Unclear."""

    record: bytes


@dataclass(frozen=True)
class ReadRecord:
    """Look who has committed: RecordFound, RecordAbsent, RecordUnreadable."""


@dataclass(frozen=True)
class DeleteSuperfluous:
    """Delete the steps that the keep policy lets go now; say which went, and with `list_steps`
    which there are then: Superfluous.
    """

    list_steps: bool


@dataclass(frozen=True)
class Tell:
    """Send the result to all: any event, but Failed where it could not be sent."""

    result: SaveResult


@dataclass(frozen=True)
class Hear:
    """Wait for the primary's result: Heard or Failed."""


Effect: TypeAlias = (
    Prepare | Gather | BuildRecord | Commit | ReadRecord | DeleteSuperfluous | Tell | Hear
)

# --- what comes back


@dataclass(frozen=True)
class Prepared:
    """Says that this process's share is durable."""

    items: Mapping[str, ItemReport]
    steps: int = 0
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)


@dataclass(frozen=True)
class Gathered:
    """Brings the reports of all processes."""

    reports: Sequence[SaveReport]


@dataclass(frozen=True)
class Sent:
    """Says that the primary has this process's report."""


@dataclass(frozen=True)
class Built:
    """Brings the record, and which replicas differ, if that is no error ("": none)."""

    record: bytes
    drift: str = ""


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
class Heard:
    """Brings the primary's result."""

    result: SaveResult


@dataclass(frozen=True)
class Failed:
    """Says that it could not be done, or that the save is called off.

    A cancel is a failure that comes before the commit.
    """

    error: Exception


Found: TypeAlias = RecordFound | RecordAbsent | RecordUnreadable
Event: TypeAlias = (
    Prepared
    | Gathered
    | Sent
    | Built
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


def lead(
    key: SaveKey, *, next_miss: int = 0, is_local: bool = False, is_unsure: bool = False
) -> Saving:
    """Does the primary's part (rank 0).

    `next_miss` is the number of this save among the misses in a row, if it may be one (else 0). A
    save that `is_local` goes onto the hosts; `is_unsure`: see `SaveReport`.
    """
    own = yield from _report(key, 0, is_unsure=is_unsure)
    result = yield from _judge(own, (yield Gather(own)))
    if isinstance(result.error, SaveFailed) and result.error.passes:
        result = replace(result, missed=next_miss)
    told = yield Tell(result)
    if not isinstance(told, Failed):
        return result
    if is_local:
        # Some may have heard it, some not: the primary knows no more than a process that heard
        # nothing, and deletes as little.
        return unheard_locally(key, f"the primary could not tell how it ended: {told.error}")
    # Who has not heard of a miss raises: so does the primary then.
    return replace(result, missed=0)


def _judge(own: SaveReport, gathered: Event) -> Saving:
    if not isinstance(gathered, Gathered):
        return _not_committed(own.key, _error(gathered))
    reports = gathered.reports
    result = yield from _commit(own.key, reports)
    if result.error is None:
        # A process that missed an earlier outcome knows other steps: all are told the list then.
        differs = any(report.steps != own.steps for report in reports)
        decided = yield DeleteSuperfluous(differs)
        if isinstance(decided, Superfluous):
            result = replace(result, after=decided)
    return replace(
        result,
        survey=any(report.is_unsure for report in reports),
        lane_off=next(filter(None, map(_why_off, reports)), ""),
    )


def _why_off(report: SaveReport) -> str:
    error = report.error
    if error is None or error.kind != TierTooLarge.__name__:
        return ""
    return error.text


def _commit(key: SaveKey, reports: Sequence[SaveReport]) -> Saving:
    try:
        check_save_reports(reports, key)
    except HoldfastError as error:
        return _not_committed(key, error)
    built = yield BuildRecord(reports)
    if not isinstance(built, Built):
        return _not_committed(key, _error(built))
    answer = yield Commit(built.record)
    if isinstance(answer, Committed):
        return SaveResult(key, drift=built.drift)
    if isinstance(answer, Refused):
        refused = _not_committed(key, answer.error)
        return replace(refused, is_there=isinstance(answer.error, StepExists))
    assert isinstance(answer, Unclear)
    # The store may have done it although its answer was lost: only a look can tell.
    return settle(key, answer, (yield from _read()))


def settle(key: SaveKey, answer: Unclear, found: Found) -> SaveResult:
    """Returns what the primary knows after an unclear answer and a look at the record. Nothing may
    be deleted, whatever it is.
    """
    why = "whether its record is there, or will be, is not known after"
    if is_ours(found, key):
        if found.durable:
            return SaveResult(key)
        why = "its record is there, but whether that is durable is not known after"
    return _unknown(key, f"{why}: {answer.error}")


def check_save_reports(reports: Sequence[SaveReport], key: SaveKey) -> None:
    """Raises the save's error when a process failed, or is at another save, step or set of items
    than the primary (rank 0).
    """
    # First of all: a report of another save says nothing about this one.
    for report in reports:
        if not fits(report.key, key):
            raise _out_of_step(report, key)
    failed = first_failed(reports, is_consequence)
    if failed is not None:
        raise reported_error(failed)
    own = reports[0].items
    for report in reports:
        if set(report.items) != set(own):
            raise SaveFailed(
                f"step {key.step} was not saved: process {report.process} saves the items"
                f" {sorted(report.items)}, the primary {sorted(own)}; expected the same"
                " items on every process",
                step=key.step,
                process=report.process,
            )


def is_consequence(report: SaveReport) -> bool:
    """Says whether a process failed since another one did, which reports the cause itself."""
    return report.error is not None and report.error.kind == PartGivenUp.__name__


def _out_of_step(report: SaveReport, key: SaveKey) -> SaveFailed:
    other = report.key
    why = "" if report.error is None else f". It failed: {report.error.text}"
    return SaveFailed(
        f"step {key.step} was not saved: process {report.process} is at its save"
        f" {other.counter} of step {other.step}, the primary at its save {key.counter} of"
        f" step {key.step}; every process has to save the same steps in the same order{why}",
        step=key.step,
        process=report.process,
    )


def reported_error(report: SaveReport) -> HoldfastError:
    """Returns what all processes raise of a report that has an error."""
    assert report.error is not None
    step = report.key.step
    if report.error.kind in _RAISED_ALIKE:
        return report.error.rebuilt(step=step)
    return SaveFailed(
        f"step {step} was not saved: process {report.process} failed: {report.error.text}",
        step=step,
        process=report.process,
        passes=bool(report.error.fields.get("passes")),
        _may_follow_death=not report.error.fields.get("errno"),
    )


# --- the others


def follow(
    key: SaveKey, process: int, *, is_local: bool = False, is_unsure: bool = False
) -> Saving:
    """Does the part of every other process; see `lead`."""
    report = yield from _report(key, process, is_unsure=is_unsure)
    sent = yield Gather(report)
    heard = yield Hear()
    # A message may be left over from a save that was given up: its key tells it apart.
    if isinstance(heard, Heard) and fits(heard.result.key, key):
        return heard.result
    untold = f"process {process} was not told how it ended: {_why_untold(sent, heard)}"
    if is_local:
        return unheard_locally(key, untold)
    if report.error is not None:
        return _not_committed(key, reported_error(report))
    return unheard(key, (yield from _read()), untold)


def _why_untold(*events: Event) -> Exception | str:
    errors = (event.error for event in events if isinstance(event, Failed))
    return next(errors, "what came was of another save")


def unheard(key: SaveKey, found: Found, why: str) -> SaveResult:
    """Returns what a process knows that heard nothing of its save, by the record."""
    return SaveResult(key) if is_ours(found, key) and found.durable else _unknown(key, why)


# --- onto the hosts


def unheard_locally(key: SaveKey, why: str) -> SaveResult:
    """Returns what a process knows of a local save whose outcome it did not hear: nothing."""
    message = (
        f"whether local step {key.step} is whole is not known: {why}. Its parts, and those of the"
        " local step before, stay until the next survey"
    )
    return SaveResult(key, CommitUnknown(message, step=key.step))


K = TypeVar("K")


def local_saves_to_delete(
    own: K,
    result: SaveResult,
    *,
    known: Sequence[K],
    written: Sequence[K],
    keep: int,
    is_unsure: bool,
) -> list[K]:
    """Returns which of the local saves that a process has written it deletes once `own` has ended.

    `known` are the local saves that may come back, newest first. Pure.
    """
    if result.error is not None:
        return [own] if result.deletable else []
    # What an unsure process has may be a part of the newest save that is whole.
    if is_unsure:
        return []
    stay = [own, *(each for each in known if each != own)][:keep]
    return [each for each in written if each not in stay]


# --- what all do


def fits(found: SaveKey, key: SaveKey) -> bool:
    """Says whether a message is of this save."""
    return found == key


def is_ours(found: Found, key: SaveKey) -> TypeGuard[RecordFound]:
    """Says whether the record that was found is this save's."""
    return isinstance(found, RecordFound) and found.save_id == key.save_id


def _report(key: SaveKey, process: int, *, is_unsure: bool) -> Generator[Effect, Event, SaveReport]:
    # A process that failed reports too: without its report the others would wait for it.
    prepared = yield Prepare()
    report = SaveReport(process, key, is_unsure=is_unsure)
    if not isinstance(prepared, Prepared):
        return replace(report, error=SentError.of(_error(prepared)))
    return replace(report, items=prepared.items, steps=prepared.steps, replicas=prepared.replicas)


def _read() -> Generator[Effect, Event, Found]:
    found: Event = RecordUnreadable()
    for _ in range(READ_TRIES):
        found = yield ReadRecord()
        if not isinstance(found, RecordUnreadable):
            break
    assert isinstance(found, Found)
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

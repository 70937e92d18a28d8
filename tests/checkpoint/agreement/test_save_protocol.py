"""The agreement of a save: its messages, how the primary judges them, and each end that primary and
followers can come to.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.checkpoint import CheckpointError, CommitUnknown, SaveFailed, StepExists
from holdfast.checkpoint.agreement import save_protocol as p
from holdfast.checkpoint.agreement.messages import SentError
from holdfast.checkpoint.agreement.save_protocol import (
    Event,
    SaveKey,
    SaveReport,
    SaveResult,
    Saving,
    check_save_reports,
    drive,
    follow,
    lead,
)
from holdfast.checkpoint.errors import failure_of
from holdfast.checkpoint.format.item_report import FileReport, ItemReport
from holdfast.coordination import BarrierTimeout, Fenced, HoldfastError, ProcessLost

KEY = SaveKey("0a0b0c0d00000003", 3, 100)
ITEMS = {"state": ItemReport(0, "hash", (FileReport("00000-00000-0a.safetensors", 10, 8, 7),))}


def report(process: int, key: SaveKey = KEY, error: SentError | None = None) -> SaveReport:
    return SaveReport(process, key, {} if error else ITEMS, error=error)


FULL = SentError("OSError", "full")


def test_reports_come_back_as_they_were() -> None:
    """A report of files and one of an error survive the wire."""
    for sent in (
        SaveReport(1, KEY, ITEMS, steps=5),
        report(2, error=FULL),
    ):
        assert SaveReport.from_bytes(sent.to_bytes()) == sent


@pytest.mark.parametrize(
    ("other", "kind", "message", "process"),
    [
        (
            report(1, SaveKey("", 4, 100)),
            SaveFailed,
            "process 1 is at its save 4 of step 100, the primary at its save 3 of step 100",
            1,
        ),
        (report(1, SaveKey("", 3, 90)), SaveFailed, "process 1 is at its save 3 of step 90", 1),
        (
            report(1, SaveKey("", 3, 0), error=SentError("ValueError", "'x' is no step")),
            SaveFailed,
            "It failed: ValueError: 'x' is no step",
            1,
        ),
        (
            report(1, error=FULL),
            SaveFailed,
            "process 1 failed: OSError: full",
            1,
        ),
        (
            report(1, error=SentError("StepExists", "step 100 is already in /x")),
            StepExists,
            "step 100 is already in /x",
            None,
        ),
        (
            SaveReport(1, KEY, {"ema": ITEMS["state"]}),
            SaveFailed,
            "saves the items ['ema'], the primary ['state']",
            1,
        ),
    ],
)
def test_one_process_that_differs_fails_the_save(
    other: SaveReport, kind: type[Exception], message: str, process: int | None
) -> None:
    """It is named, with what was expected and found."""
    check_save_reports([report(0), report(1)], KEY)
    with pytest.raises(kind) as caught:
        check_save_reports([report(0), other], KEY)
    assert message in str(caught.value) and getattr(caught.value, "process", None) == process


@pytest.mark.parametrize(
    ("error", "kind", "process"),
    [
        (BarrierTimeout("missing process 2", missing=(2, 3)), SaveFailed, 2),
        (ProcessLost("process 4 is gone", process=4), SaveFailed, 4),
        (OSError(28, "full"), SaveFailed, 0),
        (Fenced("fenced"), Fenced, None),
        (StepExists("there", step=100), StepExists, None),
        (CommitUnknown("who knows", step=100, path="/x"), CommitUnknown, None),
        (CheckpointError("else"), CheckpointError, None),
    ],
)
def test_what_the_primary_sends_is_what_the_others_raise(
    error: Exception, kind: type[HoldfastError], process: int | None
) -> None:
    """Any error becomes one of the tree that names the process, and crosses the wire with its
    facts.
    """
    sent = SaveResult.from_bytes(
        SaveResult(KEY, failure_of(error, 100, 0), deletable=True).to_bytes()
    )
    assert (
        type(sent.error) is kind
        and getattr(sent.error, "process", None) == process
        and sent.deletable
    )
    assert str(error.args[-1]) in str(sent.error)


def test_a_commit_is_sent_with_the_steps_that_go() -> None:
    """All processes forget the same steps, and know the same where they did not."""
    for after in (p.Superfluous((1, 2)), p.Superfluous(steps=(1, 2, 90))):
        sent = SaveResult(KEY, after=after)
        assert SaveResult.from_bytes(sent.to_bytes()) == sent


GATHERED = [p.Prepared(ITEMS), p.Gathered([report(0), report(1)])]
READY = [*GATHERED, p.Built(b"{}")]
FAILED = p.Failed(OSError(5, "no"))
UNCLEAR = p.Unclear(OSError(110, "timed out"))
OURS = p.RecordFound(KEY.save_id)
HALF = p.RecordFound(KEY.save_id, durable=False)
OTHERS = p.RecordFound("ffffffff00000001")
BLIND = [p.RecordUnreadable()] * p.READ_TRIES


def run(saving: Saving, events: Sequence[Event]) -> tuple[SaveResult, list[str]]:
    """Answers each effect with the next event, and a result that is told or a question for steps
    with None.
    """
    answers = iter(events)
    effects = list[str]()

    def perform(effect: p.Effect) -> Event:
        effects.append(type(effect).__name__)
        return None if isinstance(effect, p.Tell | p.DeleteSuperfluous) else next(answers)

    result = drive(saving, perform)
    assert next(answers, None) is None, "not all was asked for"
    return result, effects


@pytest.mark.parametrize(
    ("events", "kind", "deletable"),
    [
        ([*READY, p.Committed()], None, False),
        ([FAILED, p.Gathered([report(0, error=FULL), report(1)])], SaveFailed, True),
        ([p.Prepared(ITEMS), FAILED], SaveFailed, True),
        ([*GATHERED, FAILED], SaveFailed, True),
        ([*READY, p.Refused(Fenced("fenced"))], Fenced, True),
        ([*READY, UNCLEAR, OURS], None, False),
        ([*READY, UNCLEAR, HALF], CommitUnknown, False),
        ([*READY, UNCLEAR, p.RecordAbsent()], CommitUnknown, False),
        ([*READY, UNCLEAR, OTHERS], CommitUnknown, False),
        ([*READY, UNCLEAR, *BLIND], CommitUnknown, False),
        ([*READY, UNCLEAR, *BLIND[1:], OURS], None, False),
    ],
)
def test_each_end_of_the_primary(
    events: Sequence[Event], kind: type[Exception] | None, deletable: bool
) -> None:
    """What is said, and whether packs may go; the others are told each time, and the keep policy is
    asked only after a commit.
    """
    result, effects = run(lead(KEY), events)
    assert (type(result.error) if result.error else None) is kind and result.deletable == deletable
    assert effects[-1] == "Tell" and ("DeleteSuperfluous" in effects) == (kind is None)
    assert effects.count("Commit") == (len(events) > 3)


PASSES = report(1, error=SentError("OSError", "full", {"passes": True}))


@pytest.mark.parametrize(
    ("events", "missed"),
    [
        ([p.Prepared(ITEMS), p.Gathered([report(0), PASSES])], 2),
        ([p.Prepared(ITEMS), p.Gathered([report(0), report(1, error=FULL)])], 0),
        ([p.Prepared(ITEMS), p.Failed(BarrierTimeout("late", missing=(1,)))], 2),
        ([p.Prepared(ITEMS), p.Failed(ProcessLost("dead", process=1))], 0),
        ([*GATHERED, p.Failed(RuntimeError("a defect"))], 0),
        ([*READY, p.Refused(OSError("the store says no"))], 2),
        ([*READY, p.Refused(Fenced("fenced"))], 0),
        ([*READY, p.Refused(StepExists("there"))], 0),
        ([*READY, p.Refused(SaveFailed("late", passes=True))], 2),
        ([*READY, UNCLEAR, OTHERS], 0),
        ([*READY, p.Committed()], 0),
    ],
)
def test_a_failure_that_passes_is_a_miss_for_all(events: Sequence[Event], missed: int) -> None:
    """The primary says so in what it tells; where it may not be a miss, and where it could not be
    told, nobody takes it for one.
    """
    result, _ = run(lead(KEY, next_miss=2), events)
    assert result.missed == missed == SaveResult.from_bytes(result.to_bytes()).missed
    assert run(lead(KEY), events)[0].missed == 0

    def perform(effect: p.Effect) -> Event:
        return p.Failed(OSError("mute")) if isinstance(effect, p.Tell) else next(answers, None)

    answers = iter(events)
    assert drive(lead(KEY, next_miss=2), perform).missed == 0


TOLD = SaveResult(KEY, after=p.Superfluous((90,)))


@pytest.mark.parametrize(
    ("events", "kind", "deletable"),
    [
        ([p.Prepared(ITEMS), p.Sent(), p.Heard(TOLD)], None, False),
        (
            [p.Prepared(ITEMS), FAILED, p.Heard(SaveResult(KEY, SaveFailed("no"), deletable=True))],
            SaveFailed,
            True,
        ),
        ([p.Prepared(ITEMS), p.Sent(), FAILED, OURS], None, False),
        ([p.Prepared(ITEMS), p.Sent(), FAILED, HALF], CommitUnknown, False),
        ([p.Prepared(ITEMS), p.Sent(), FAILED, p.RecordAbsent()], CommitUnknown, False),
        ([p.Prepared(ITEMS), p.Sent(), FAILED, OTHERS], CommitUnknown, False),
        ([p.Prepared(ITEMS), p.Sent(), FAILED, *BLIND], CommitUnknown, False),
        (
            [
                p.Prepared(ITEMS),
                p.Sent(),
                p.Heard(SaveResult(SaveKey("", 2, 90), SaveFailed("no"), True)),
                OURS,
            ],
            None,
            False,
        ),
        (
            [
                p.Prepared(ITEMS),
                p.Sent(),
                p.Heard(SaveResult(SaveKey("", 2, 90))),
                p.RecordAbsent(),
            ],
            CommitUnknown,
            False,
        ),
        ([FAILED, FAILED, FAILED], SaveFailed, True),
    ],
)
def test_each_end_of_the_others(
    events: Sequence[Event], kind: type[Exception] | None, deletable: bool
) -> None:
    """They believe what is of this save, read the record where nothing is, and know by themselves
    that it failed where they failed.
    """
    result, _ = run(follow(KEY, 1), events)
    assert (type(result.error) if result.error else None) is kind and result.deletable == deletable
    assert result.key == KEY


def test_processes_that_know_other_steps_are_told_all() -> None:
    """The primary is asked for its list where a report's CRC of steps differs from its own, and
    only there.
    """
    for steps, asked in ((7, False), (8, True)):
        saving = lead(KEY)
        events: list[Event] = [
            None,
            p.Prepared(ITEMS, 7),
            p.Gathered([SaveReport(0, KEY, ITEMS, 7), SaveReport(1, KEY, ITEMS, steps)]),
        ]
        for event in [*events, p.Built(b"{}")]:
            saving.send(event)
        assert saving.send(p.Committed()) == p.DeleteSuperfluous(asked)
        told = saving.send(p.Superfluous((1,), (1, 90) if asked else None))
        assert isinstance(told, p.Tell) and told.result == SaveResult(
            KEY, after=p.Superfluous((1,), (1, 90) if asked else None)
        )


LOCAL_TOLD = SaveResult(KEY)
REFUSED = p.Refused(SaveFailed("called off"))
TOLD_BEFORE = SaveResult(SaveKey("", 2, 90))
LOCAL_READY = [*GATHERED, p.Built(b"{}")]


@pytest.mark.parametrize(
    ("process", "events", "kind", "deletable"),
    [
        (0, [*LOCAL_READY, p.Committed(), p.Superfluous(), None], None, False),
        (0, [*LOCAL_READY, p.Committed(), p.Superfluous(), FAILED], CommitUnknown, False),
        (0, [*LOCAL_READY, REFUSED, None], SaveFailed, True),
        (0, [*LOCAL_READY, REFUSED, FAILED], CommitUnknown, False),
        (0, [p.Prepared(ITEMS), FAILED, None], SaveFailed, True),
        (1, [p.Prepared(ITEMS), p.Sent(), p.Heard(LOCAL_TOLD)], None, False),
        (1, [p.Prepared(ITEMS), p.Sent(), FAILED], CommitUnknown, False),
        (1, [FAILED, p.Sent(), FAILED], CommitUnknown, False),
        (1, [p.Prepared(ITEMS), p.Sent(), p.Heard(TOLD_BEFORE)], CommitUnknown, False),
    ],
)
def test_each_end_of_a_local_save(
    process: int, events: Sequence[Event], kind: type[Exception] | None, deletable: bool
) -> None:
    """Only an outcome that was told makes a part deletable; no record is ever read."""
    answers = iter(events)
    effects = list[str]()

    def perform(effect: p.Effect) -> Event:
        effects.append(type(effect).__name__)
        return next(answers)

    saving = p.lead(KEY, is_local=True) if process == 0 else p.follow(KEY, process, is_local=True)
    result = drive(saving, perform)
    assert (type(result.error) if result.error else None) is kind and result.deletable == deletable
    assert "ReadRecord" not in effects and next(answers, "none") == "none"


def test_the_cause_comes_before_what_follows_from_it() -> None:
    """A part that was given up is not why a save failed: its owner says why."""
    given_up = report(0, error=SentError("PartGivenUp", "process 1 has given its part up"))
    for reports in ([given_up, report(1, error=FULL)], [report(1, error=FULL), given_up]):
        with pytest.raises(SaveFailed, match="process 1 failed: OSError: full"):
            check_save_reports(reports, KEY)


def test_an_unsure_process_has_all_survey() -> None:
    """Its report says so, and the result asks for it, however the save ends."""
    reports = [report(0), SaveReport(1, KEY, ITEMS, is_unsure=True)]
    answers = iter([p.Prepared(ITEMS), p.Gathered(reports), p.Built(b"{}"), REFUSED, None])
    result = drive(p.lead(KEY, is_local=True), lambda effect: next(answers))
    assert result.survey and SaveResult.from_bytes(result.to_bytes()).survey


def test_which_local_saves_go() -> None:
    """After a commit what is older than `keep`; after a failure its own part; else nothing."""

    def goes(result: SaveResult, *, is_unsure: bool = False) -> list[int]:
        return p.local_saves_to_delete(
            4, result, known=[3, 2], written=[1, 2, 3, 4], keep=2, is_unsure=is_unsure
        )

    failed = SaveResult(KEY, SaveFailed("no"), deletable=True)
    assert goes(LOCAL_TOLD) == [1, 2]
    assert goes(LOCAL_TOLD, is_unsure=True) == []
    assert goes(failed) == goes(failed, is_unsure=True) == [4]
    assert goes(SaveResult(KEY, CommitUnknown("who knows"))) == []

"""The messages of a save: what each process reports, how the primary judges, what it sends to all."""

from __future__ import annotations

import pytest

from holdfast.checkpoint import CheckpointError, CommitUnknown, SaveFailed, StepExists
from holdfast.checkpoint.errors import failure_of
from holdfast.checkpoint.format.files import FileReport, ItemReport
from holdfast.checkpoint.saving.protocol import SaveReport, SaveResult, check_save_reports
from holdfast.coordination import BarrierTimeout, Fenced, HoldfastError, ProcessLost


def report(process: int, counter: int = 3, step: int = 100, **more: str) -> SaveReport:
    item = ItemReport(process, "hash", (FileReport(f"0000{process}-00000-0a.safetensors", 10, 8, 7),))
    return SaveReport(process, counter, step, {} if more else {"state": item}, **more)


def test_reports_come_back_as_they_were() -> None:
    """A report of files and one of an error survive the wire."""
    for sent in (report(1), report(2, error="OSError: full", kind="OSError")):
        assert SaveReport.from_bytes(sent.to_bytes()) == sent


@pytest.mark.parametrize(
    ("other", "kind", "message", "process"),
    [
        (report(1, counter=4), SaveFailed, "process 1 is at its save 4 of step 100, the primary at its save 3 of step 100", 1),
        (report(1, step=90), SaveFailed, "process 1 is at its save 3 of step 90", 1),
        (report(1, error="OSError: full", kind="OSError"), SaveFailed, "process 1 failed: OSError: full", 1),
        (report(1, error="step 100 is already in /x", kind="StepExists"), StepExists, "step 100 is already in /x", None),
        (SaveReport(1, 3, 100, {"ema": report(1).items["state"]}), SaveFailed, "saves the items ['ema'], the primary ['state']", 1),
    ],
)
def test_one_process_that_differs_fails_the_save(other: SaveReport, kind: type[Exception], message: str, process: int | None) -> None:
    """It is named, with what was expected and found."""
    check_save_reports([report(0), report(1)], 3, 100)
    with pytest.raises(kind) as caught:
        check_save_reports([report(0), other], 3, 100)
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
def test_what_the_primary_sends_is_what_the_others_raise(error: Exception, kind: type[HoldfastError], process: int | None) -> None:
    """Any error becomes one of the tree that names the process, and crosses the wire with its facts."""
    sent = SaveResult.from_bytes(SaveResult(100, failure_of(error, 100, 0)).to_bytes())
    assert type(sent.error) is kind and getattr(sent.error, "process", None) == process
    assert str(error) in str(sent.error)


def test_a_commit_is_sent_with_the_steps_that_go() -> None:
    """All processes forget the same steps."""
    assert SaveResult.from_bytes(SaveResult(100, None, (1, 2)).to_bytes()) == SaveResult(100, None, (1, 2))

"""The status for programs: what docs/status-json.md says is what is written."""

from __future__ import annotations

import re

from holdfast.coordination.diagnosis.findings import Finding
from holdfast.coordination.diagnosis.status_json import SCHEMA, message_json, status_json
from holdfast.coordination.diagnosis.verdict import JobState
from holdfast.proto import session_pb2
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "status-json.md").read_text()


def described(section: str) -> dict[str, str]:
    """Returns the names and types of a section's first table; "" is the page's beginning."""
    text = PAGE if not section else PAGE.split(f"\n## {section}\n")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", text.split("\n## ")[0], re.MULTILINE)
    return {name: re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", kind) for name, kind in rows}


def test_the_whole_is_described() -> None:
    """With what is not of the protocol: the verdict, and the diagnosis."""
    ours = {"schema": "integer", "verdict": "Verdict", "diagnosis": "list of Finding"}
    assert described("") == ours
    finding = Finding("failed", "process 1 has failed", (1,), ("b1",))
    shown = status_json(session_pb2.StatusResponse(num_processes=2), [finding])
    assert shown["schema"] == SCHEMA == 3
    assert set(shown["verdict"]) == set(described("Verdict"))
    assert set(shown["diagnosis"][0]) == set(described("Finding"))
    assert shown.keys() == ours.keys() | described("StatusResponse").keys() - {"launcher"}


def test_every_state_is_described() -> None:
    """By the word that programs compare with."""
    listed = PAGE.split("The states: ")[1].split("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == {state.value for state in JobState}


def test_numbers_are_numbers() -> None:
    """Steps, sizes and counts too, however deep; and what is no number stays."""
    status = session_pb2.StatusResponse(keys=3)
    progress = status.tasks.add(task_id=1).progress
    progress.step = 2**40
    progress.values["loss"] = 0.5
    progress.root.MergeFrom(
        session_pb2.CheckpointRoot(path="7", num_steps=1, steps=[{"step": 5, "bytes": 2**50}])
    )
    shown = message_json(status)
    told = shown["tasks"][0]["progress"]
    assert (shown["keys"], told["step"], told["values"]) == (3, 2**40, {"loss": 0.5})
    assert told["root"]["path"] == "7"
    assert told["root"]["steps"][0]["bytes"] == 2**50

"""The status for programs: what docs/status-json.md says is what is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from holdfast.coordination.diagnosis.findings import Finding
from holdfast.coordination.diagnosis.status_json import SCHEMA, message_json, status_json
from holdfast.coordination.diagnosis.verdict import JobState
from holdfast.proto import session_pb2
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "status-json.md").read_text()
TYPES = {
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_ENUM: "string",
}
MESSAGES = [
    *("TaskStatus", "ReportRequest", "CheckpointRoot", "CheckpointStep", "HostCopies"),
    *("BarrierStatus", "Waiting", "KeyPrefix", "Event", "Launcher"),
]


def described(section: str) -> dict[str, str]:
    """Returns the names and types of a section's first table; "" is the page's beginning."""
    text = PAGE if not section else PAGE.split(f"\n## {section}\n")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", text.split("\n## ")[0], re.MULTILINE)
    return {name: re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", kind) for name, kind in rows}


def declared(name: str) -> dict[str, str]:
    """Returns the names and types of a message of the protocol."""
    fields = session_pb2.DESCRIPTOR.message_types_by_name[name].fields
    return {field.name: type_of(field) for field in fields}


def type_of(field: Any) -> str:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return "object of numbers"
    name = kind.name if kind is not None else TYPES[field.cpp_type]
    return f"list of {name}" if field.is_repeated else name


@pytest.mark.parametrize("name", MESSAGES)
def test_every_name_is_described_with_its_type(name: str) -> None:
    """None is missing, none is there that is not written."""
    assert described(name) == declared(name)


def test_the_whole_is_described() -> None:
    """With what is not of the protocol: the verdict, and the diagnosis."""
    ours = {"schema": "integer", "verdict": "Verdict", "diagnosis": "list of Finding"}
    assert described("") == ours | declared("StatusResponse")
    finding = Finding("failed", "process 1 has failed", (1,), ("b1",))
    shown = status_json(session_pb2.StatusResponse(num_processes=2), [finding])
    assert shown["schema"] == SCHEMA == 3
    assert set(shown["verdict"]) == set(described("Verdict"))
    assert set(shown["diagnosis"][0]) == set(described("Finding"))
    assert shown.keys() == described("").keys() - {"launcher"}


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

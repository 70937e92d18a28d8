"""The tables of docs/status-json.md: names and types of the messages, with proto/session.proto's
comments.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from holdfast.proto import session_pb2

SOURCE = Path(__file__).resolve().parent.parent / "proto" / "session.proto"
TYPES = {
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_ENUM: "string",
}
_MESSAGE = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r" (\w+) = \d+; *// (.+)")


def status_tables() -> str:
    """Returns a section for the status, and for each message in it."""
    messages = _MESSAGE.findall(SOURCE.read_text())
    texts = {name: dict(_COMMENT.findall(body)) for name, body in messages}
    kinds = [session_pb2.StatusResponse.DESCRIPTOR]
    sections = []
    for kind in kinds:  # which grows while it is read
        rows = []
        for field in kind.fields:
            below = field.message_type
            if below is not None and not is_map(field) and below not in kinds:
                kinds.append(below)
            comment = texts[kind.name].get(field.name, "")
            rows.append(f"| `{field.name}` | {type_of(field)} | {comment} |\n")
        heading = f"\n## {kind.name}\n\n| name | type | |\n|---|---|---|\n"
        sections.append(heading + "".join(rows))
    return "".join(sections)


def is_map(field: Any) -> bool:
    """Says whether a field is a map."""
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def type_of(field: Any) -> str:
    """Returns the type of a field in words, messages as links to their sections."""
    if is_map(field):
        return "object of numbers"
    kind = field.message_type
    name = TYPES[field.cpp_type] if kind is None else f"[{kind.name}](#{kind.name.lower()})"
    return f"list of {name}" if field.default_value == [] else name

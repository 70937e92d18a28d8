"""A job's status as JSON for programs: docs/status-json.md has its names and types. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from holdfast.proto import session_pb2

from .findings import Finding
from .verdict import judge

SCHEMA = 3
"""The number of what is written. It rises when a name or a type changes, or one goes."""

_INTEGERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def status_json(
    status: session_pb2.StatusResponse, findings: Sequence[Finding] = ()
) -> dict[str, Any]:
    """Returns a status with its verdict and what is wrong, as JSON holds them."""
    return {
        "schema": SCHEMA,
        "verdict": judge(status, findings).as_json(),
        "diagnosis": [finding.as_json() for finding in findings],
        **message_json(status),
    }


def message_json(message: Message) -> dict[str, Any]:
    """Returns a message as JSON: numbers are numbers, and what was not set has its default."""
    shown = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_numbers(message.DESCRIPTOR, shown)


def _with_numbers(kind: Any, shown: dict[str, Any]) -> dict[str, Any]:
    """Returns what protobuf wrote of a message of that kind, 64-bit integers as numbers."""
    return {name: _value(kind.fields_by_name[name], value) for name, value in shown.items()}


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_value(field, each) for each in value]
    if field.cpp_type in _INTEGERS:
        return int(value)
    kind = field.message_type
    if kind is None or kind.GetOptions().map_entry:
        return value
    return _with_numbers(kind, value)

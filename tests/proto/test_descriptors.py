"""The words on the wire are jaxlib's: proto/ against the descriptors inside the installed
jaxlib.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from holdfast.coordination.server.profiles import RPCS_A, RPCS_B
from holdfast.proto import coordination_b_pb2, coordination_pb2

PROFILE_A = "xla/pjrt/distributed/coordination/coordination_service.proto"
PROFILE_B = "xla/tsl/protobuf/coordination_service.proto"
WIRE_TYPES = {
    5: "int32",
    14: "int32",
    3: "int64",
    6: "fixed64",
    8: "bool",
    9: "string",
    12: "bytes",
    11: "message",
}  # an enum is an int32


def _jaxlib_binaries() -> list[Path]:
    import jaxlib

    return [
        path
        for path in Path(jaxlib.__file__).parent.glob("*.so")
        if path.stat().st_size > 1_000_000
    ]


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift = shift + 7
        at = at + 1
        if data[at - 1] < 128:
            return value, at


def _ends(data: mmap.mmap, start: int) -> Iterator[int]:
    """Returns each place where a FileDescriptorProto that begins at `start` may end: after each
    field that it can have.
    """
    at = start
    while True:
        tag, after = _varint(data, at)
        if not 1 <= tag >> 3 <= 14 or tag & 7 not in (0, 2):
            return
        size, after = _varint(data, after)
        at = after + (size if tag & 7 == 2 else 0)
        if at - start > 200_000:
            return
        yield at


def embedded(name: str) -> descriptor_pb2.FileDescriptorProto | None:
    """Returns the descriptor of a .proto file inside jaxlib's binary."""
    needle = re.compile(re.escape(b"\x0a" + bytes([len(name)]) + name.encode()))
    for path in _jaxlib_binaries():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = needle.search(data)
            best = None
            for end in _ends(data, found.start()) if found else ():
                try:
                    best = descriptor_pb2.FileDescriptorProto.FromString(data[found.start() : end])
                except DecodeError:
                    break
            if best is not None:
                return best
    return None


def _fields(message: descriptor_pb2.DescriptorProto) -> dict[int, tuple[str, str, bool]]:
    label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    return {
        field.number: (field.name, WIRE_TYPES[field.type], field.label == label)
        for field in message.field
    }


@pytest.mark.parametrize(
    ("name", "ours", "methods"),
    [(PROFILE_A, coordination_pb2, RPCS_A), (PROFILE_B, coordination_b_pb2, RPCS_B)],
    ids=["A", "B"],
)
def test_every_message_has_jaxlibs_fields(
    name: str, ours: object, methods: dict[str, object]
) -> None:
    """Each message of ours has the numbers, names and types of jaxlib's, and every rpc that it
    declares and calls is served.
    """
    theirs = embedded(name)
    assert theirs is not None, f"{name} is not in this jaxlib: the wire may have changed"
    known = {message.name: _fields(message) for message in theirs.message_type}
    own = descriptor_pb2.FileDescriptorProto.FromString(ours.DESCRIPTOR.serialized_pb)  # type: ignore[attr-defined]
    compared = 0
    for message in own.message_type:
        if message.name in known:
            assert _fields(message) == known[message.name], message.name
            compared += 1
    assert compared >= 28
    declared = {method.name for service in theirs.service for method in service.method}
    not_called = {"WaitForAllTasks", "ResetTask", "ReportErrorToTask"}  # by no jax from 0.7 on
    assert declared - not_called <= set(methods)


def test_states_are_jaxlibs() -> None:
    """The states of a task have jaxlib's numbers."""
    theirs = embedded(PROFILE_A)
    assert theirs is not None
    (states,) = (enum for enum in theirs.enum_type if enum.name == "TaskState")
    assert {value.name: value.number for value in states.value} == dict(
        coordination_pb2.TaskState.items()
    )

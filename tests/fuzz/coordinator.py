"""Programs against a coordinator: frames of Sessions, calls of agents, time that passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.limits import Config, Limits
from holdfast.coordination.names import PROFILE_A
from holdfast.coordination.server.service import Service
from holdfast.proto import distributed_runtime_pb2 as d
from holdfast.proto import session_pb2
from tests.support.in_process import InMemoryStream, InMemoryWriter

_OWN = {
    "Report": session_pb2.ReportRequest,
    "ReportAgain": session_pb2.ReportRequest,
    "ReportError": session_pb2.ReportErrorRequest,
    "SetKeys": session_pb2.SetKeysRequest,
}
_RPCS = Service(Machine(Config(1, 77), 0.0), lambda: 0.0).rpcs
_LIMITS = Limits(value_bytes=1 << 16, total_bytes=1 << 20, keys=100, waiters_per_task=50)
CONFIG = Config(3, 77, job="j", attempt=1, recoverable=True, limits=_LIMITS)


def run(data: bytes) -> None:
    """Runs a program, a JSON list of steps, and raises where the service met a defect.

    Steps: ["frame", stream, ClientFrame], ["request", stream, method, message, Request's fields],
    ["call", path, message], ["close", stream], ["tick", seconds], ["bytes", stream or path, hex].
    """
    try:
        steps = json.loads(data)
    except (ValueError, RecursionError):
        return
    _Run().run(steps if isinstance(steps, list) else [])


class _Run:
    def __init__(self) -> None:
        self._now = 1.0
        self._service = Service(Machine(CONFIG, 0.0), lambda: self._now)
        self._streams = [InMemoryStream() for _ in range(4)]

    def run(self, steps: list[Any]) -> None:
        for step in steps[:200]:
            self._step(step)
            self._service.flush()
            assert not self._service.status().defects, self._service.status().defects

    def _step(self, step: Any) -> None:
        match step:
            case ["frame", int(who), fields]:
                self._frame(who, bytes_of(session_pb2.ClientFrame, fields))
            case ["request", int(who), str(method), fields, dict(more)]:
                self._frame(who, request_of(method, fields, more))
            case ["call", str(path), fields]:
                kind = _kind_of(path)
                body = b"" if kind is None else bytes_of(kind, fields)
                if body is not None:
                    self._service.unary(path, body, InMemoryWriter())
            case ["bytes", int(who), str(text)]:
                self._frame(who, text.encode("latin-1", "replace"))
            case ["bytes", str(path), str(text)]:
                self._service.unary(path, text.encode("latin-1", "replace"), InMemoryWriter())
            case ["close", int(who)]:
                self._service.stream_closed(self._streams[who % 4])
                self._streams[who % 4] = InMemoryStream()
            case ["tick", int(seconds) | float(seconds)] if 0 <= seconds < 1e6:
                self._now += seconds
                self._service.tick()

    def _frame(self, who: int, body: bytes | None) -> None:
        stream = self._streams[who % 4]
        if body is not None and stream.end is None:
            self._service.stream_frame(stream, body)


def _kind_of(path: str) -> Any:
    rpc = _RPCS.get(path)
    return None if rpc is None else getattr(rpc.parse, "__self__", d.EnumerateDevicesRequest)


def _message(kind: Any, fields: Any) -> Any:
    try:
        return ParseDict(fields, kind(), ignore_unknown_fields=True)
    except (ParseError, ValueError, TypeError, AttributeError, SystemError):  # upb: a surrogate
        return None


def request_of(method: str, fields: Any, more: dict[str, Any]) -> bytes | None:
    """Returns a frame that calls a method."""
    kind = _OWN.get(method) or _kind_of(PROFILE_A + method)
    body = None if kind is None else bytes_of(kind, fields)
    request = _message(session_pb2.Request, more)
    if body is None or request is None:
        return None
    request.method = method
    request.body = body
    return session_pb2.ClientFrame(request=request).SerializeToString()


def bytes_of(kind: Any, fields: Any) -> bytes | None:
    """Returns a message as it is on the wire; None for fields that it has not."""
    message = _message(kind, fields)
    return None if message is None else message.SerializeToString()


def seeds() -> list[bytes]:
    """Returns programs in which each rpc is called once, by somebody who may."""
    return [json.dumps(list(steps)).encode() for steps in (sessions(), _agents())]


def _dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message)


def sessions() -> Iterator[list[Any]]:
    """Yields the steps of three processes that call each rpc of a Session."""
    for who in range(3):
        opening = session_pb2.Open(process_id=who, incarnation=5 + who, host="h", pid=9)
        yield ["frame", who, _dict(session_pb2.ClientFrame(open=opening))]
    number = 0
    for method, kind in [*_OWN.items(), *((name, None) for name in _names(PROFILE_A))]:
        for who in range(3):
            number += 1
            message = _example(kind or _kind_of(PROFILE_A + method), who)
            yield ["request", who, method, message, {"id": number, "timeoutMs": 5000}]
    yield ["frame", 0, {"cancel": {"id": number}}]
    yield ["frame", 0, {"answer": {"id": 1, "body": ""}}]
    yield ["close", 1]
    yield ["tick", 3]
    yield ["tick", 100]


def _agents() -> Iterator[list[Any]]:
    for path in _RPCS:
        for who in range(3):
            yield ["call", path, _example(_kind_of(path), who)]
    yield ["tick", 100]


def _names(profile: str) -> list[str]:
    return [path.removeprefix(profile) for path in _RPCS if path.startswith(profile)]


def _example(kind: Any, who: int) -> dict[str, Any]:
    """Returns a message with something in each field, by their types."""
    return _fill(kind.DESCRIPTOR, who, 0)


def _fill(descriptor: Any, who: int, depth: int) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for field in descriptor.fields:
        value: Any = who
        if field.message_type is not None:
            if depth > 2 or field.message_type.GetOptions().map_entry:
                continue
            value = _fill(field.message_type, who, depth + 1)
        elif field.type == field.TYPE_STRING:
            value = "k"
        elif field.type == field.TYPE_BYTES:
            value = "AAAA"
        elif field.type == field.TYPE_BOOL:
            value = True
        filled[field.json_name] = [value] if field.default_value == [] else value
    return filled

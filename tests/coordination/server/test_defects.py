"""Every rpc, with every field of its messages filled by chance: none meets a defect of ours, and
the status and the journal can always be written. No sockets.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.diagnosis.findings import Evidence, diagnose
from holdfast.coordination.limits import Config
from holdfast.coordination.names import PROFILE_A, PROFILE_B, REPORT_AGAIN, REPORT_EXIT, STATUS
from holdfast.coordination.server.profiles import RPCS_A, Rpc
from holdfast.coordination.server.service import Service, UnaryCall
from holdfast.proto import coordination_b_pb2, distributed_runtime_pb2, session_pb2
from tests.support.filled_messages import fill
from tests.support.in_process import INCARNATION, InMemoryStream, InMemoryWriter

_PROCESSES = 3
_UNARY: dict[str, Any] = {
    # A builtin method knows its message; profile D's own function parses one of two.
    path: getattr(rpc.parse, "__self__", distributed_runtime_pb2.EnumerateDevicesRequest3)
    for path, rpc in Service(Machine(Config(1, INCARNATION), 0.0), lambda: 0.0).rpcs.items()
}
_OWN: dict[str, Any] = {
    "Report": session_pb2.ReportRequest,
    REPORT_AGAIN: session_pb2.ReportRequest,
    "ReportError": session_pb2.ReportErrorRequest,
    "SetKeys": session_pb2.SetKeysRequest,
}
_SESSION: dict[str, Any] = _OWN | {
    path.removeprefix(PROFILE_A): _UNARY[path] for path in map(PROFILE_A.__add__, RPCS_A)
}


class _Stream(InMemoryStream):
    """A stream that, as the real ones, passes over what is written after its end."""

    def write(self, frame: bytes, shared: bytes = b"") -> None:
        if self.end is None:
            super().write(frame, shared)


class _Journal:
    """Rows of a journal, written as the real one writes them."""

    state = "journal"

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], bytes] = {}

    def write(self, machine: Machine) -> None:
        for row in journal_codec.drain(machine, 1_000.0):
            if row.value is None:
                self.rows.pop((row.table, row.key), None)
            else:
                self.rows[row.table, row.key] = row.value

    def close(self, finished: bool) -> None:
        """Has nothing to close."""


class _Drawn:
    """A service whose callers draw what they call."""

    def __init__(self, seed: int, *, recoverable: bool) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.journal = _Journal()
        self.config = Config(_PROCESSES, INCARNATION, recoverable=recoverable)
        machine = Machine(self.config, self.now)
        self.service = Service(machine, lambda: self.now, self.journal)
        self.streams: dict[int, InMemoryStream] = {}
        self.sent = 0

    def unary(self, path: str) -> None:
        """Makes a call, in the name of an agent that may have registered."""
        request = fill(_UNARY[path](), self.chance)
        task_id = self.chance.randrange(_PROCESSES)
        for name, value in (("source_task_id", task_id), ("incarnation", 10 + task_id)):
            if name in request.DESCRIPTOR.fields_by_name and self.chance.random() < 0.8:
                setattr(request, name, value)
        if "incarnations" in request.DESCRIPTOR.fields_by_name:
            request.incarnations.task_incarnation = 10 + task_id  # type: ignore[attr-defined]
            request.incarnations.service_incarnation = INCARNATION  # type: ignore[attr-defined]
        self.service.unary(path, request.SerializeToString(), InMemoryWriter())

    def session(self) -> None:
        """Sends a frame on a Session, which is opened where there is none."""
        task_id = self.chance.randrange(_PROCESSES)
        stream = self.streams.get(task_id)
        if stream is None or stream.end is not None:
            stream = self.streams[task_id] = _Stream()
            opening = session_pb2.Open(
                process_id=task_id, incarnation=self.chance.choice((20, 21)), host="b", pid=7
            )
            self._send(stream, session_pb2.ClientFrame(open=opening))
            return
        self.sent += 1
        frame = session_pb2.ClientFrame()
        drawn = self.chance.random()
        if drawn < 0.1:
            frame.cancel.id = self.chance.randrange(1, self.sent + 1)
        elif drawn < 0.2:
            frame.answer.id = self.chance.randrange(3)
            frame.answer.body = b"\xff stacks"
        else:
            method = self.chance.choice(list(_SESSION))
            fill(frame.request, self.chance)
            frame.request.id = self.sent
            frame.request.method = method
            frame.request.body = fill(_SESSION[method](), self.chance).SerializeToString()
            if self.chance.random() < 0.8:
                frame.request.ClearField("participants")
        self._send(stream, frame)

    def _send(self, stream: InMemoryStream, frame: session_pb2.ClientFrame) -> None:
        self.service.stream_frame(stream, frame.SerializeToString())

    def step(self) -> None:
        """Lets one thing happen, and time pass."""
        if self.chance.random() < 0.6:
            self.session()
        else:
            self.unary(self.chance.choice(list(_UNARY)))
        self.service.flush()
        self.now += self.chance.choice((0.0, 0.1, 2.0))
        self.service.tick()
        self.service.flush()

    def load_journal(self) -> None:
        """Reads the journal as a service that is started again."""
        rows = [journal_codec.Row(*key, value) for key, value in self.journal.rows.items()]
        journal_codec.load(Machine(self.config, self.now), rows, self.now, 1_000.0)


def _answer(service: Service, path: str, request: Any) -> tuple[str, Any] | None:
    writer = InMemoryWriter()
    service.unary(path, request.SerializeToString(), writer)
    service.flush()
    return writer.outcome


@pytest.mark.parametrize("seed", range(20))
def test_no_rpc_meets_a_defect(seed: int) -> None:
    """400 calls, each with all that its message can hold: none raises; after each the status can be
    written, and the journal, which a service that is started again reads.
    """
    drawn = _Drawn(seed, recoverable=seed % 2 == 0)
    for _ in range(400):
        drawn.step()
        outcome = _answer(drawn.service, STATUS, session_pb2.StatusRequest(with_events=True))
        assert outcome is not None and outcome[0] == "OK", outcome
        assert not session_pb2.StatusResponse.FromString(outcome[1]).defects
    drawn.load_journal()


def _raises(*arguments: Any, **settings: Any) -> Any:
    raise LookupError("no such\nthing")


_DEFECT = (
    "the coordinator met a defect of its own in {}: LookupError: no such thing; its log has the"
    " traceback: please report it"
)


def test_who_meets_a_defect_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """INTERNAL, for a unary call, a call of a Session, and one whose answer cannot be encoded; a
    frame that cannot be taken ends its Session. The log has one traceback for each place, the
    history and the status a line, and the service goes on.
    """
    drawn = _Drawn(0, recoverable=True)
    service = drawn.service
    service.publish_status()
    stream = InMemoryStream()
    service.stream_frame(stream, _frame(open=session_pb2.Open(process_id=0, incarnation=5)))
    broken_row = Rpc(_raises, parse=session_pb2.ReportExitRequest.FromString)
    monkeypatch.setitem(service.rpcs, REPORT_EXIT, broken_row)
    monkeypatch.setattr(service.machine, "report", _raises)
    for _ in range(2):
        outcome = _answer(service, REPORT_EXIT, session_pb2.ReportExitRequest())
        assert outcome == ("INTERNAL", _DEFECT.format("ReportExit"))
    with monkeypatch.context() as broken:
        broken.setattr(UnaryCall, "encoded", _raises)
        request = coordination_b_pb2.GetTaskStateRequest()
        outcome = _answer(service, PROFILE_B + "GetTaskState", request)
    assert outcome == ("INTERNAL", _DEFECT.format("an answer"))
    service.stream_frame(stream, _frame(request=session_pb2.Request(id=7, method="Report")))
    service.flush()
    (reply,) = stream.replies()
    assert (reply.id, reply.code, reply.message) == (7, 13, _DEFECT.format("Report"))
    monkeypatch.setattr(service.machine, "seen", _raises)
    service.stream_frame(stream, _frame(request=session_pb2.Request(id=8, method="Report")))
    assert stream.end == ("INTERNAL", _DEFECT.format("a frame of a Session"))
    with monkeypatch.context() as broken:
        broken.setattr(service, "status", _raises)
        service.tick()
    outcome = _answer(service, STATUS, session_pb2.StatusRequest(with_events=True))
    assert outcome is not None and outcome[0] == "OK"
    status = session_pb2.StatusResponse.FromString(outcome[1])
    places = (
        "ReportExit",
        "an answer",
        "Report",
        "a frame of a Session",
        "the status for Prometheus",
    )
    known = [_DEFECT.format(place) for place in places]
    assert list(status.defects) == known
    assert [event.text for event in status.events if event.kind == "coordinator"] == known
    assert [(each.getMessage(), each.exc_info is not None) for each in caplog.records] == [
        (sentence, True) for sentence in known
    ]
    assert [finding.text for finding in diagnose(Evidence(status))] == known


def _frame(**kind: Any) -> bytes:
    return session_pb2.ClientFrame(**kind).SerializeToString()

"""Sessions on the service's side: opening, requests, cancels, deltas, queries to a process, and
their ends. No sockets.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.limits import Config, Limits
from holdfast.coordination.names import MISSING_TYPE, NOBODY
from holdfast.coordination.server.defects import Defects
from holdfast.coordination.server.profiles import Requested, Rpc
from holdfast.coordination.server.sessions import (
    DELTA_INTERVAL_S,
    SessionCall,
    SessionStreams,
)
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.in_process import InMemoryStream


class Sessions:
    """The Sessions of a machine whose clock stands at `now`."""

    def __init__(self, num_tasks: int = 2, opened: int = 2, **settings: Any) -> None:
        self.machine = Machine(Config(num_tasks, 77, job="j", attempt=1, **settings), 0.0)
        self.sessions = SessionStreams(
            self.machine,
            Defects(self.machine.events, lambda: self.now),
        )
        self.now = 1.0
        self.streams = [InMemoryStream() for _ in range(opened)]
        for process_id, stream in enumerate(self.streams):
            self.open(stream, process_id=process_id, incarnation=5 + process_id)

    def send(self, stream: InMemoryStream, **frame: Any) -> None:
        self.sessions.frame(stream, session_pb2.ClientFrame(**frame).SerializeToString(), self.now)
        self.flush()

    def open(self, stream: InMemoryStream, **fields: Any) -> None:
        self.send(stream, open=session_pb2.Open(**fields))

    def request(
        self, index: int, number: int, method: str, message: Any = None, **fields: Any
    ) -> None:
        body = b"" if message is None else message.SerializeToString()
        self.send(
            self.streams[index],
            request=session_pb2.Request(id=number, method=method, body=body, **fields),
        )

    def flush(self) -> None:
        for call in self.machine.take_answers():
            if isinstance(call, SessionCall):
                call.answer(self.machine)
        self.sessions.note_changes(self.now)

    def open_tasks(self) -> set[int]:
        return {task.task_id for task in self.machine.task_table.tasks if task.attached}

    def ask_stacks(self, asked: int) -> Requested:
        """Asks for the stacks of a process, as whoever looks at the job."""
        call = Requested(
            self.machine.answers,
            NOBODY,
            self.now,
            rpc=Rpc(self.sessions.ask_stacks),
            request=session_pb2.StacksRequest(task_id=asked),
        )
        self.sessions.ask_stacks(self.machine, call)
        self.flush()
        return call

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.machine.tick(self.now)
        self.sessions.tick(self.now)
        self.flush()


def test_a_session_opens_with_the_jobs_settings() -> None:
    """The first frame of the service says which it is and what it serves."""
    sessions = Sessions(heartbeat_timeout_s=2.5, recoverable=True)
    opened = sessions.streams[0].frames[0].opened
    assert (opened.service_incarnation, opened.heartbeat_timeout_ms, opened.num_processes) == (
        77,
        2500,
        2,
    )
    assert (opened.job, opened.attempt, opened.recoverable, opened.survivable) == (
        "j",
        1,
        True,
        False,
    )
    assert sessions.open_tasks() == {0, 1}


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"job": "k", "attempt": 1}, "PERMISSION_DENIED"),
        ({"job": "j", "attempt": 2}, "PERMISSION_DENIED"),
        ({"num_processes": 3}, "PERMISSION_DENIED"),
        ({"process_id": 9}, "INVALID_ARGUMENT"),
        ({"incarnation": 0}, "INVALID_ARGUMENT"),
        ({"host": "h" * 300}, "RESOURCE_EXHAUSTED"),
    ],
)
def test_an_opening_may_be_refused(fields: dict[str, Any], end: str) -> None:
    """Another job, attempt, size, number, no incarnation, a long name: the stream ends and no task
    has come.
    """
    sessions = Sessions(opened=0)
    stream = InMemoryStream()
    sessions.open(stream, **({"process_id": 0, "incarnation": 5} | fields))
    assert stream.end is not None and stream.end[0] == end and not stream.frames
    assert sessions.open_tasks() == set() and not sessions.machine.task_table.connected_count


def test_frames_out_of_order_end_the_stream() -> None:
    """A request before Open, a second Open, and bytes that are no frame."""
    sessions = Sessions()
    stream = InMemoryStream()
    sessions.send(stream, request=session_pb2.Request(id=1, method="Heartbeat"))
    assert stream.end == ("FAILED_PRECONDITION", "a Session's first frame is Open")
    sessions.open(sessions.streams[0], process_id=0, incarnation=5)
    assert sessions.streams[0].end == ("FAILED_PRECONDITION", "this Session is open already")
    sessions.sessions.frame(sessions.streams[1], b"\xff\xff", 1.0)
    assert sessions.streams[1].end == ("INVALID_ARGUMENT", "the frame is not a ClientFrame")
    assert sessions.open_tasks() == set()


def test_a_second_stream_takes_the_firsts_place() -> None:
    """The first one is ABORTED, its waiting calls are forgotten, and the task goes on."""
    sessions = Sessions()
    stream = InMemoryStream()
    sessions.request(0, 1, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="k"))
    sessions.open(stream, process_id=0, incarnation=5)
    assert sessions.streams[0].end == ("ABORTED", "process 0 has opened another Session")
    assert sessions.machine.waiting_calls() == {} and sessions.machine.task_table.connected(0)
    sessions.sessions.closed(sessions.streams[0])
    assert sessions.open_tasks() == {0, 1}


def test_a_stream_that_was_given_up_comes_too_late() -> None:
    """Its Open was on its way for longer than that of the next, which stays. Another life of the
    process counts anew.
    """
    sessions = Sessions(1, opened=0, recoverable=True)
    first = InMemoryStream()
    next_ = InMemoryStream()
    another = InMemoryStream()
    sessions.open(next_, process_id=0, incarnation=5, number=2)
    sessions.open(first, process_id=0, incarnation=5, number=1)
    assert first.end == ("ABORTED", "process 0 has opened another Session since")
    assert next_.end is None and sessions.open_tasks() == {0}
    sessions.sessions.closed_by_client(first, 1.0)
    sessions.tick(60.0)
    assert sessions.machine.task_table.connected(0)
    sessions.open(another, process_id=0, incarnation=6, number=1)
    assert another.end is None and next_.end is not None


def test_who_has_left_is_not_lost_for_a_stream_that_was_given_up() -> None:
    """Its Open was on its way until the process was gone; with no other process here, the service
    is over.
    """
    sessions = Sessions(1, opened=0, recoverable=True)
    left = InMemoryStream()
    given_up = InMemoryStream()
    sessions.streams = [left]
    sessions.open(left, process_id=0, incarnation=5, number=2)
    sessions.request(0, 1, "ShutdownTask")
    sessions.sessions.closed_by_client(left, 1.0)
    sessions.open(given_up, process_id=0, incarnation=5, number=1)
    assert given_up.end == ("ABORTED", "process 0 has opened another Session since")
    assert sessions.machine.all_shut_down()


def test_a_failure_names_the_missing() -> None:
    """The reply holds code, sentence and a payload with each missing process."""
    sessions = Sessions(3, opened=2)
    arrive = coordination_pb2.BarrierRequest(barrier_id="b", barrier_timeout_in_ms=1000)
    sessions.request(0, 4, "Barrier", arrive)
    sessions.tick(2.0)
    (reply,) = sessions.streams[0].replies()
    assert (reply.id, reply.code) == (4, 4) and "missing processes 1 (silent for" in reply.message
    missing = session_pb2.Missing.FromString(reply.payloads[MISSING_TYPE])
    assert [(task.task_id, task.silent_s >= 0) for task in missing.tasks] == [(1, True), (2, False)]


def test_what_no_method_takes_is_answered() -> None:
    """An unknown method is UNIMPLEMENTED, a body that is no message INVALID_ARGUMENT; the Session
    stays.
    """
    sessions = Sessions()
    sessions.request(0, 1, "Nonsense")
    sessions.send(
        sessions.streams[0], request=session_pb2.Request(id=2, method="Barrier", body=b"\xff\xff")
    )
    assert [(reply.id, reply.code) for reply in sessions.streams[0].replies()] == [(1, 12), (2, 3)]
    assert sessions.open_tasks() == {0, 1}


def test_a_cancelled_call_is_answered_once() -> None:
    """It ends CANCELLED and waits no longer; to cancel it again does nothing."""
    sessions = Sessions()
    sessions.request(0, 1, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="k"))
    for _ in range(2):
        sessions.send(sessions.streams[0], cancel=session_pb2.Cancel(id=1))
    assert [(reply.id, reply.code) for reply in sessions.streams[0].replies()] == [(1, 1)]
    assert sessions.machine.waiting_calls() == {}


def test_a_get_needing_the_lost_ends() -> None:
    """The field `needs` of a request reaches the machine."""
    sessions = Sessions(recoverable=True, heartbeat_timeout_s=5.0)
    sessions.request(0, 1, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="k"), needs=[1])
    for _ in range(8):
        sessions.request(0, 9, "Heartbeat")
        sessions.tick(1.0)
    assert [reply.code for reply in sessions.streams[0].replies() if reply.id == 1] == [14]


def test_a_flood_of_one_session_is_cut_off() -> None:
    """More calls in a second than the limit, or more waiting calls, are RESOURCE_EXHAUSTED; the
    next second is another.
    """
    sessions = Sessions(limits=Limits(calls_per_second=3, waiters_per_task=2))
    for number in range(5):
        sessions.request(0, number, "Heartbeat")
    assert [reply.code for reply in sessions.streams[0].replies()] == [0, 0, 0, 8, 8]
    sessions.tick(1.0)
    for number in range(10, 13):
        sessions.request(0, number, "GetKeyValue", coordination_pb2.GetKeyValueRequest(key="k"))
    assert [(reply.id, reply.code) for reply in sessions.streams[0].replies()[5:]] == [(12, 8)]


def test_deltas_are_coalesced_and_full_at_first() -> None:
    """The first delta holds all tasks; changes within the interval go out together, with the
    changed tasks alone.
    """
    sessions = Sessions(3, opened=1, recoverable=True)
    sessions.tick(DELTA_INTERVAL_S)
    (first,) = sessions.streams[0].deltas()
    assert [task.info.task_id for task in first.tasks] == [0, 1, 2]
    for process_id in (1, 2):
        sessions.open(InMemoryStream(), process_id=process_id, incarnation=9, host=f"h{process_id}")
    sessions.tick(DELTA_INTERVAL_S / 2)
    assert len(sessions.streams[0].deltas()) == 1 and sessions.sessions.next_due() > sessions.now
    sessions.tick(DELTA_INTERVAL_S / 2 + 1e-6)
    _, second = sessions.streams[0].deltas()
    assert [(task.info.task_id, task.host) for task in second.tasks] == [
        (1, "h1"),
        (2, "h2"),
    ]
    sessions.tick(1.0)
    assert len(sessions.streams[0].deltas()) == 2  # nothing has changed since


def test_a_client_that_does_not_read_is_dropped() -> None:
    """Past the backlog its stream ends, at a delta and at a reply; the others get theirs."""
    limits = Limits(backlog_bytes=100)
    sessions = Sessions(limits=limits)
    sessions.streams[0].backlog_bytes = 101
    sessions.tick(DELTA_INTERVAL_S)
    assert sessions.streams[0].end == (
        "RESOURCE_EXHAUSTED",
        "the client has left 101 bytes unread; expected 100 at most",
    )
    assert sessions.streams[1].deltas() and sessions.open_tasks() == {1}
    sessions.streams[1].backlog_bytes = 2 * limits.message_bytes + 1
    sessions.request(1, 1, "Heartbeat")
    assert (
        sessions.streams[1].end is not None
        and "bytes of replies unread" in sessions.streams[1].end[1]
    )


def test_a_member_answers_for_no_other() -> None:
    """Stacks asked of process 1 are not taken from process 0, who guesses the number of the
    question; many ask at the price of one.
    """
    sessions = Sessions()
    calls = [sessions.ask_stacks(1) for _ in range(50)]
    (asked,) = [frame.ask.id for frame in sessions.streams[1].frames if frame.HasField("ask")]
    for number in range(asked + 10):
        sessions.send(sessions.streams[0], answer=session_pb2.Answer(id=number, body=b"forged"))
    assert not any(call.done for call in calls)
    sessions.send(sessions.streams[1], answer=session_pb2.Answer(id=asked, body=b"true"))
    assert [_stacks(call) for call in calls] == [b"true"] * 50


def _stacks(call: Requested) -> bytes:
    stacks: bytes = call.value.stacks
    return stacks


def _failed(call: Requested) -> tuple[int, str] | None:
    return None if call.status is None else (call.status.code, call.status.message)


def test_a_process_without_an_answer_is_passed_over() -> None:
    """Without an answer in time, or without a Session, the question fails, unless its watchdog has
    left a report.
    """
    sessions = Sessions(3)
    silent = sessions.ask_stacks(1)
    assert not silent.done
    absent = (14, "process 2 has no Session now, so it cannot be asked")
    assert _failed(sessions.ask_stacks(2)) == absent
    sessions.tick(21.0)
    assert _failed(silent) == (4, "the process did not answer within 20 s")
    sessions.machine.keys.put("holdfast/stacks/2", b'{"why": "stuck", "stacks": "here"}')
    assert _stacks(sessions.ask_stacks(2)) == b"Left by its watchdog: stuck\nhere"


def test_nobody_waits_for_who_goes_away() -> None:
    """The question ends with its Session, with an error where its watchdog has left nothing."""
    sessions = Sessions()
    call = sessions.ask_stacks(1)
    sessions.sessions.closed(sessions.streams[1])
    assert _failed(call) == (14, "process 1 has ended its Session, so it cannot answer")


def test_who_is_given_up_is_fenced_at_once() -> None:
    """Its open stream ends with ABORTED and the reason, and so does the next that it opens; the
    others' streams stay.
    """
    sessions = Sessions(recoverable=True, heartbeat_timeout_s=5.0)
    for _ in range(8):
        sessions.request(0, 9, "Heartbeat")
        sessions.tick(1.0)
    again = InMemoryStream()
    sessions.open(again, process_id=1, incarnation=6)
    for stream in (sessions.streams[1], again):
        assert (
            stream.end is not None
            and stream.end[0] == "ABORTED"
            and "this life of process 1 is over" in stream.end[1]
        )
    assert sessions.open_tasks() == {0}


def test_who_has_no_stream_may_be_silent() -> None:
    """A stream keeps its process there while it waits for the others; taken over by another stream
    of it, too; closed, no longer.
    """
    sessions = Sessions(3, heartbeat_timeout_s=5.0)
    second = InMemoryStream()
    sessions.open(second, process_id=1, incarnation=6)
    sessions.sessions.closed(sessions.streams[0])
    for _ in range(8):
        sessions.tick(1.0)
    assert [sessions.machine.task_table.connected(task_id) for task_id in range(2)] == [False, True]


def test_only_its_own_end_makes_one_suspect() -> None:
    """A stream that another took over from, and one that was dropped because nobody read it, are no
    suspicion; a closed one is.
    """
    sessions = Sessions(3, 3, recoverable=True, limits=Limits(backlog_bytes=100))
    second = InMemoryStream()
    tasks = sessions.machine.task_table.tasks
    first = sessions.streams[0]
    sessions.open(second, process_id=0, incarnation=tasks[0].session)
    sessions.sessions.closed_by_client(first, sessions.now)
    sessions.streams[1].backlog_bytes = 101
    sessions.tick(DELTA_INTERVAL_S)
    sessions.sessions.closed_by_client(sessions.streams[1], sessions.now)
    assert (
        sessions.streams[1].end is not None and [task.suspect_since for task in tasks] == [None] * 3
    )
    sessions.sessions.closed_by_client(sessions.streams[2], sessions.now)
    assert tasks[2].suspect_since == sessions.now


def test_a_failure_says_how_far_others_came() -> None:
    """What a sentence shows of a process's report travels with the error that names it, its values
    do not; the two who wait get the same bytes, encoded once.
    """
    sessions = Sessions(4, opened=3)
    sessions.request(2, 1, "Report", session_pb2.ReportRequest(step=40, values={"loss": 0.5}))
    arrive = coordination_pb2.BarrierRequest(barrier_id="b", barrier_timeout_in_ms=1000)
    for index in range(2):
        sessions.request(index, 4, "Barrier", arrive)
    sessions.tick(2.0)
    payloads = [sessions.streams[index].replies()[-1].payloads[MISSING_TYPE] for index in range(2)]
    reported, silent = session_pb2.Missing.FromString(payloads[0]).tasks
    assert (reported.task_id, reported.progress.step) == (2, 40) and not reported.progress.values
    assert silent.task_id == 3 and not silent.HasField("progress") and payloads[0] == payloads[1]

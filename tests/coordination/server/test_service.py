"""The service between transport and machine: unary calls, who may make them, flushes and the
journal, and the end. No sockets.
"""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.limits import Config
from holdfast.coordination.names import (
    END_ATTEMPT,
    PROFILE_A,
    PROFILE_B,
    REPORT_EXIT,
    STACKS,
    STATUS,
)
from holdfast.coordination.server.service import Service
from holdfast.proto import coordination_b_pb2, coordination_pb2, session_pb2
from tests.support.in_process import INCARNATION, InMemoryStream, InMemoryWriter


class Recorder:
    """A journal that notes in which order things happen."""

    state = "journal"

    def __init__(self, writers: list[InMemoryWriter]) -> None:
        self.writers = writers
        self.answered_at_write: list[int] = []
        self.finished: bool | None = None

    def write(self, machine: Machine) -> None:
        self.answered_at_write.append(sum(writer.outcome is not None for writer in self.writers))

    def close(self, finished: bool) -> None:
        self.finished = finished


class Served:
    """A service whose clock stands at `now`."""

    def __init__(
        self, num_tasks: int = 2, *, secured: bool = False, journaled: bool = False, **settings: Any
    ) -> None:
        self.now = 0.0
        self.writers: list[InMemoryWriter] = []
        self.journal = Recorder(self.writers) if journaled else None
        machine = Machine(Config(num_tasks, INCARNATION, **settings), self.now)
        self.service = Service(machine, lambda: self.now, self.journal, secured=secured)

    def call(self, path: str, body: bytes, key: str = "") -> InMemoryWriter:
        writer = InMemoryWriter(key)
        self.writers.append(writer)
        self.service.unary(path, body, writer)
        self.service.flush()
        return writer

    def register(self, task_id: int, key: str = "") -> InMemoryWriter:
        request = coordination_pb2.RegisterTaskRequest(
            incarnation=10 + task_id, source_task_id=task_id
        )
        return self.call(PROFILE_A + "RegisterTask", request.SerializeToString(), key)

    def heartbeat(self, task_id: int, key: str = "", service_incarnation: int = INCARNATION) -> str:
        stamp = coordination_pb2.Incarnations(
            task_incarnation=10 + task_id, service_incarnation=service_incarnation
        )
        request = coordination_pb2.HeartbeatRequest(
            incarnation=10 + task_id, source_task_id=task_id, incarnations=stamp
        )
        outcome = self.call(PROFILE_A + "Heartbeat", request.SerializeToString(), key).outcome
        assert outcome is not None
        return outcome[0]


def test_agents_register_and_beat() -> None:
    """The first waits for the second; then both live, and a call to another life of the service is
    INTERNAL.
    """
    served = Served()
    first = served.register(0)
    assert first.outcome is None
    second = served.register(1)
    for writer in (first, second):
        assert writer.outcome is not None
        assert (
            coordination_pb2.RegisterTaskResponse.FromString(writer.outcome[1]).service_incarnation
            == INCARNATION
        )
    assert served.heartbeat(0) == "OK" and served.heartbeat(1, service_incarnation=1) == "INTERNAL"


@pytest.mark.parametrize(
    ("path", "code", "sentence"),
    [
        (
            "/a/B",
            "UNIMPLEMENTED",
            (
                "/a/B is not served here; expected one of profiles A, B and D, or"
                " /holdfast.Coordination/Session"
            ),
        ),
        (
            PROFILE_A + "Barrier",
            "INVALID_ARGUMENT",
            f"{PROFILE_A}Barrier: the request is not a message of this rpc",
        ),
        (STACKS, "INVALID_ARGUMENT", f"{STACKS}: the request is not a message of this rpc"),
    ],
)
def test_what_is_no_request_is_answered_at_once(path: str, code: str, sentence: str) -> None:
    """Unknown paths and bytes that are no message."""
    assert Served().call(path, b"\xff\xff").outcome == (code, sentence)


@pytest.mark.parametrize("path", [REPORT_EXIT, END_ATTEMPT])
def test_a_launcher_is_answered_once_the_journal_is_written(path: str) -> None:
    """What the coordinator has acknowledged survives its death."""
    served = Served(journaled=True)
    served.register(0)
    served.register(1)
    assert served.journal is not None
    served.journal.answered_at_write.clear()
    answer = served.call(path, b"").outcome
    assert answer == ("OK", b"") and served.journal.answered_at_write == [2]


@pytest.mark.parametrize("task_id", [-1, 2, -(2**31)])
def test_nobody_speaks_for_a_process_that_the_job_has_not(task_id: int) -> None:
    """Below the first and beyond the last, for each kind of call in a process's name."""
    served = Served()
    served.register(0)
    served.register(1)
    task = coordination_b_pb2.CoordinatedTask(task_id=task_id)
    calls: list[tuple[str, Message]] = [
        (PROFILE_B + "Heartbeat", coordination_b_pb2.HeartbeatRequest(source_task=task)),
        (PROFILE_B + "Barrier", coordination_b_pb2.BarrierRequest(source_task=task)),
        (PROFILE_B + "ShutdownTask", coordination_b_pb2.ShutdownTaskRequest(source_task=task)),
        (PROFILE_B + "PollForError", coordination_b_pb2.PollForErrorRequest(source_task=task)),
        (REPORT_EXIT, session_pb2.ReportExitRequest(process_id=task_id, exit_code=1)),
    ]
    sentence = f"there is no process {task_id}: the job has 2, 0 to 1"
    for path, request in calls:
        outcome = served.call(path, request.SerializeToString()).outcome
        assert outcome == ("INVALID_ARGUMENT", sentence), path
    assert served.service.connected == 2


def test_a_call_that_is_dropped_is_not_answered() -> None:
    """A waiting get that its transport drops leaves nothing behind; at a barrier a client that goes
    away does not matter.
    """
    served = Served()
    writer = InMemoryWriter()
    body = coordination_b_pb2.GetKeyValueRequest(key="k").SerializeToString()
    call = served.service.unary(PROFILE_B + "GetKeyValue", body, writer)
    assert call is not None
    served.service.drop(call)
    served.call(
        PROFILE_B + "InsertKeyValue",
        coordination_b_pb2.InsertKeyValueRequest(kv={"key": "k"}).SerializeToString(),
    )
    assert writer.outcome is None


def test_a_secured_service_asks_for_the_key() -> None:
    """A task is its key's: no key, and another's, are PERMISSION_DENIED, and are no sign of life of
    the task.
    """
    served = Served(secured=True)
    served.register(0, "zero"), served.register(1, "one")
    served.now = 5.0
    assert served.heartbeat(0) == served.heartbeat(0, "one") == "PERMISSION_DENIED"
    assert served.service.machine.task_table.tasks[0].last_seen == 0.0
    assert served.heartbeat(0, "zero") == "OK"
    assert served.service.machine.task_table.tasks[0].last_seen == 5.0


def test_the_journal_is_written_before_any_answer() -> None:
    """Each flush writes first; a job that ends unfinished leaves its journal. The loop may come
    round once more after that.
    """
    served = Served(journaled=True)
    assert served.journal is not None
    served.register(0), served.register(1)
    assert served.journal.answered_at_write == [0, 0]
    assert served.service.status().journal == "journal"
    served.service.close_journal()
    served.service.flush()
    assert served.journal.finished is False and len(served.journal.answered_at_write) == 2


def test_the_status_is_published_for_other_threads() -> None:
    """Empty before it is wanted; then at most a second old."""
    served = Served(job="j")
    assert served.service.published_status().job == ""
    served.service.publish_status()
    assert (
        served.service.published_status().job == "j"
        and served.service.published_status().calls == 0
    )
    served.call(STATUS, b"")
    served.service.tick()
    assert served.service.published_status().calls == 1
    served.call(STATUS, b"")
    served.now = 0.5
    served.service.tick()
    assert served.service.published_status().calls == 1
    served.now = 1.5
    served.service.tick()
    assert served.service.published_status().calls == 2


def test_why_a_service_ends() -> None:
    """Nobody came, all are gone for long enough, or all have shut down; 0 is never."""
    served = Served(1, recoverable=True, heartbeat_timeout_s=5.0)
    served.now = 11.0
    assert (
        served.service.over(60, 10) == "no process came within 10 s"
        and served.service.over(60, 0) is None
    )
    served.register(0)
    assert served.service.over(60, 10) is None
    for _ in range(30):
        served.now += 1.0
        served.service.tick()
    assert served.service.over(10, 10) is not None and served.service.over(0, 10) is None
    assert str(served.service.over(10, 10)).startswith("every process has been gone for ")
    done = Served(1, recoverable=True)
    done.register(0)
    stamp = coordination_pb2.Incarnations(task_incarnation=10, service_incarnation=INCARNATION)
    done.call(
        PROFILE_A + "ShutdownTask",
        coordination_pb2.ShutdownTaskRequest(
            source_task_id=0, incarnations=stamp
        ).SerializeToString(),
    )
    assert done.service.over(0, 0) == "every process has shut down"


def test_a_service_of_a_deserted_job_ends() -> None:
    """One of two came, waited and went: after the linger time the service ends, unless somebody
    comes before.
    """
    served = Served(2)
    writer = InMemoryWriter()
    request = coordination_pb2.RegisterTaskRequest(incarnation=10).SerializeToString()
    waiting = served.service.unary(PROFILE_A + "RegisterTask", request, writer)
    assert waiting is not None and served.service.over(60, 0) is None
    served.service.drop(waiting)
    assert served.service.over(60, 0) is None
    served.now = 61.0
    assert (
        served.service.over(60, 0)
        == "the job never gathered, and nobody of it has been there for 61 s"
        and served.service.over(0, 0) is None
    )
    served.service.unary(PROFILE_A + "RegisterTask", request, InMemoryWriter())
    assert served.service.over(60, 0) is None


def test_a_lost_agent_learns_so_and_ends() -> None:
    """A key is refused it with ABORTED, its heartbeat says why, and its shutdown is OK."""
    served = Served(2, recoverable=True, heartbeat_timeout_s=5.0)
    served.register(0), served.register(1)
    for _ in range(8):
        assert served.heartbeat(0) == "OK"
        served.now += 1.0
        served.service.tick()
    stamp = coordination_pb2.Incarnations(task_incarnation=11, service_incarnation=INCARNATION)
    insert = coordination_pb2.InsertKeyValueRequest(
        incarnations=stamp, kv={"key": "k"}
    ).SerializeToString()
    outcome = served.call(PROFILE_A + "InsertKeyValue", insert).outcome
    assert (
        outcome is not None and outcome[0] == "ABORTED" and not served.service.machine.keys.values
    )
    assert served.heartbeat(1) == "UNAVAILABLE"
    leave = coordination_pb2.ShutdownTaskRequest(
        source_task_id=1, incarnations=stamp
    ).SerializeToString()
    assert served.call(PROFILE_A + "ShutdownTask", leave).outcome == ("OK", b"")


def test_the_end_reaches_every_session() -> None:
    """Each stream ends with CANCELLED and the reason."""
    served = Served()
    stream = InMemoryStream()
    frame = session_pb2.ClientFrame(open=session_pb2.Open(process_id=0, incarnation=5))
    served.service.stream_frame(stream, frame.SerializeToString())
    served.service.close()
    assert stream.end == ("CANCELLED", "the coordination service ends")

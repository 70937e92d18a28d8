"""The service's side of our Session streams: frames in, replies and deltas out. One thread, no sockets."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from holdfast.proto import coordination_pb2, session_pb2

from ..core.machine import Machine
from ..core.status import Code, Completion, Status
from ..core.task_table import Task
from .admission import Owners
from .profiles import RPCS_A, Caller, Rpc, message_of, payloads, task_info
from .report import left_stacks

log = logging.getLogger("holdfast.coordination")

DELTA_INTERVAL_S = 0.1
MISSING_TYPE = "type.googleapis.com/holdfast.Missing"
_STACKS_TIMEOUT_S = 20.0
_NOBODY: frozenset[int] = frozenset()


class Stream(Protocol):
    """One Session as a transport knows it; `task_id` and `incarnation` are ours to set."""

    session: Session | None
    key: str  # of its caller, in a secured service

    def names(self) -> Sequence[bytes]: ...  # in its caller's certificate
    def write(self, frame: bytes) -> None: ...
    def finish(self, code: int, message: str) -> None: ...  # ends the stream after what has been written
    @property
    def backlog_bytes(self) -> int: ...


class Wire(Protocol):
    """One unary call as a transport knows it. Exactly one of the two methods is called, once."""

    key: str  # of its caller, in a secured service

    def names(self) -> Sequence[bytes]: ...  # in its caller's certificate
    def succeed(self, body: bytes) -> None: ...
    def fail(self, code: int, message: str, details: bytes) -> None: ...


class Session:
    """A stream that has been opened by a task."""

    __slots__ = ("ask", "calls", "frames", "incarnation", "second", "stream", "task_id", "version")

    def __init__(self, stream: Stream, task_id: int, incarnation: int) -> None:
        self.stream, self.task_id, self.incarnation = stream, task_id, incarnation
        self.version = -1
        self.ask = 0  # the number of the last one that it was asked
        self.second, self.frames = 0.0, 0
        self.calls: dict[int, SessionCall] = {}


class SessionCall:
    """One request of a Session."""

    __slots__ = ("caller", "number", "rpc", "session")

    def __init__(self, session: Session, number: int, rpc: Rpc | None, caller: Caller) -> None:
        self.session, self.number, self.rpc, self.caller = session, number, rpc, caller

    def settle(self, machine: Machine, reply: Completion) -> None:
        """Sends the machine's reply as a frame."""
        self.session.calls.pop(self.number, None)
        limits, stream = machine.config.limits, self.session.stream
        if stream.backlog_bytes > 2 * limits.message_bytes:
            stream.finish(Code.RESOURCE_EXHAUSTED, f"the client has left {stream.backlog_bytes} bytes of replies unread")
            return
        out = session_pb2.ServerFrame()
        if reply.refusal is None:
            out.reply.id = self.number
            if self.rpc is not None:
                out.reply.body = self.rpc.encode(machine, reply.value, self.caller)
            elif reply.value is not None:
                out.reply.body = reply.value
        else:
            _fill_refusal(out.reply, self.number, reply.refusal)
        self.session.stream.write(out.SerializeToString())


def _fill_refusal(reply: session_pb2.Reply, number: int, refusal: Status) -> None:
    reply.id, reply.code, reply.message = number, int(refusal.code), message_of(refusal)
    for name, payload in payloads(refusal).items():
        reply.payloads[name] = payload
    if refusal.missing:
        missing = session_pb2.Missing()
        for each in refusal.missing:
            silent_s = -1.0 if each.silent_s is None else each.silent_s
            missing.tasks.add(task_id=each.task_id, host=each.host, silent_s=silent_s, lost=each.lost)
        reply.payloads[MISSING_TYPE] = missing.SerializeToString()


class StacksCall:
    """A unary call for the stacks of one process: what it says of itself, else what its watchdog has left."""

    __slots__ = ("_task_id", "_wire")

    def __init__(self, wire: Wire, task_id: int) -> None:
        self._wire, self._task_id = wire, task_id

    def settle(self, machine: Machine, reply: Completion) -> None:
        """Answers with all that is known; fails only where nothing is."""
        live = session_pb2.StacksResponse.FromString(reply.value).stacks.decode() if reply.refusal is None else ""
        found = "\n".join(filter(None, [live, left_stacks(machine, self._task_id)]))
        if found or reply.refusal is None:
            self._wire.succeed(session_pb2.StacksResponse(stacks=found.encode()).SerializeToString())
        else:
            self._wire.fail(reply.refusal.code, message_of(reply.refusal), b"")


class Streams:
    """All Sessions of a job: at most one for each task."""

    def __init__(self, machine: Machine, owners: Owners | None = None) -> None:
        self._machine, self._owners = machine, owners
        self._sessions: dict[int, Session] = {}
        self._told_version = 0
        self._tell_at = math.inf
        self._told_at = -math.inf
        self._asks: dict[int, tuple[list[SessionCall | StacksCall], float]] = {}
        self._ask_count = 0

    def open_tasks(self) -> set[int]:
        """Returns the tasks that have a stream now."""
        return set(self._sessions)

    # ---- Frames --------------------------------------------------------------------------------------------------------------------

    def frame(self, stream: Stream, body: bytes, now: float, status: Callable[[], session_pb2.StatusResponse]) -> None:
        """Takes one frame of a client."""
        try:
            frame = session_pb2.ClientFrame.FromString(body)
        except DecodeError:
            self._end(stream, Code.INVALID_ARGUMENT, "the frame is not a ClientFrame")
            return
        kind = frame.WhichOneof("frame")
        session = stream.session
        if session is None:
            if kind == "open":
                self._open(stream, frame.open, now)
            else:
                self._end(stream, Code.FAILED_PRECONDITION, "a Session's first frame is Open")
            return
        self._machine.seen(session.task_id, now)
        if kind == "request":
            self._request(session, frame.request, now, status)
        elif kind == "cancel":
            self._cancel(session, frame.cancel.id)
        elif kind == "answer":
            self._answered(session, frame.answer)
        elif kind == "open":
            self._end(stream, Code.FAILED_PRECONDITION, "this Session is open already")

    def _open(self, stream: Stream, opening: session_pb2.Open, now: float) -> None:
        refusal = self._other_job(opening) or self._others(stream, opening)
        if refusal is None:
            refusal = self._machine.coming.open_session(opening.process_id, opening.incarnation, opening.host, opening.pid, now)
        if refusal is not None:
            stream.finish(refusal.code, refusal.message)
            return
        older = self._sessions.get(opening.process_id)
        if older is not None:
            self._end(older.stream, Code.ABORTED, f"process {opening.process_id} has opened another Session")
        session = stream.session = Session(stream, opening.process_id, opening.incarnation)
        self._sessions[session.task_id] = session
        config = self._machine.config
        opened = session_pb2.Opened(
            service_incarnation=config.incarnation,
            heartbeat_timeout_ms=int(config.heartbeat_timeout_s * 1000),
            num_processes=config.num_tasks,
            job=config.job,
            attempt=config.attempt,
            recoverable=config.recoverable,
            survivable=config.survivable,
        )
        stream.write(session_pb2.ServerFrame(opened=opened).SerializeToString())
        self._tell_soon(now)

    def _others(self, stream: Stream, opening: session_pb2.Open) -> Status | None:
        if self._owners is None:
            return None
        has_stream = opening.process_id in self._sessions
        return self._owners.may_come(opening.process_id, stream.key, stream.names(), has_stream)

    def _other_job(self, opening: session_pb2.Open) -> Status | None:
        config = self._machine.config
        if opening.job and config.job and (opening.job, opening.attempt) != (config.job, config.attempt):
            expected, found = f"job {config.job!r}, attempt {config.attempt}", f"job {opening.job!r}, attempt {opening.attempt}"
        elif opening.num_processes not in (0, config.num_tasks):
            expected, found = f"a job of {config.num_tasks} processes", f"one of {opening.num_processes}"
        else:
            return None
        return Status(Code.PERMISSION_DENIED, f"this service coordinates {expected}; process {opening.process_id} belongs to {found}")

    def _request(
        self, session: Session, request: session_pb2.Request, now: float, status: Callable[[], session_pb2.StatusResponse]
    ) -> None:
        rpc = RPCS_A.get(request.method)
        deadline = now + request.timeout_ms / 1000 if request.timeout_ms > 0 else math.inf
        needs = frozenset(request.needs) if request.needs else _NOBODY
        caller = Caller(session.task_id, session.incarnation, True, deadline, needs)
        call = SessionCall(session, request.id, rpc, caller)
        if (sentence := self._too_much(session, now)) is not None:
            call.settle(self._machine, Completion(call, None, Status(Code.RESOURCE_EXHAUSTED, sentence)))
            return
        session.calls[request.id] = call
        try:
            if rpc is not None:
                rpc.run(self._machine, call, rpc.parse(request.body), caller, now)
            else:
                self._own_method(call, request, now, status)
        except DecodeError:
            refusal = Status(Code.INVALID_ARGUMENT, f"{request.method}: the body is not a message of this method")
            self._machine.replies.append(Completion(call, None, refusal))

    def _too_much(self, session: Session, now: float) -> str | None:
        limits = self._machine.config.limits
        if now - session.second >= 1.0:
            session.second, session.frames = now, 0
        session.frames += 1
        if session.frames > limits.calls_per_second:
            return f"process {session.task_id} makes more than {limits.calls_per_second} calls in a second; slow down"
        if len(session.calls) >= limits.waiters_per_task:
            return f"process {session.task_id} has {len(session.calls)} calls waiting; expected fewer"
        return None

    def _own_method(
        self, call: SessionCall, request: session_pb2.Request, now: float, status: Callable[[], session_pb2.StatusResponse]
    ) -> None:
        machine, task_id = self._machine, call.caller.task_id
        if request.method == "Report":
            report = session_pb2.ReportRequest.FromString(request.body)
            step = report.step if report.HasField("step") else None
            saved_step = report.saved_step if report.HasField("saved_step") else None
            machine.report(call, task_id, step, saved_step, dict(report.values))
        elif request.method == "ReportError":
            error = session_pb2.ReportErrorRequest.FromString(request.body)
            machine.report_error(call, task_id, error.error_code, error.error_message, now)
        elif request.method == "GetStatus":
            machine.replies.append(Completion(call, status().SerializeToString(), None))
        elif request.method == "Stacks":
            self.ask_stacks(call, session_pb2.StacksRequest.FromString(request.body).task_id, now)
        else:
            refusal = Status(Code.UNIMPLEMENTED, f"there is no method {request.method[:100]!r}")
            machine.replies.append(Completion(call, None, refusal))

    def _cancel(self, session: Session, number: int) -> None:
        call = session.calls.get(number)
        if call is not None:
            self._machine.drop(call)
            call.settle(self._machine, Completion(call, None, Status(Code.CANCELLED, "the caller took the call back")))

    # ---- Asking a client -----------------------------------------------------------------------------------------------------------

    def ask_stacks(self, call: SessionCall | StacksCall, task_id: int, now: float) -> None:
        """Asks a process for the stacks of its threads."""
        asked = self._sessions.get(task_id)
        if asked is None:
            refusal = Status(Code.UNAVAILABLE, f"process {task_id} has no Session now, so it cannot be asked")
            self._machine.replies.append(Completion(call, None, refusal))
            return
        askers, _ = self._asks.get(asked.ask, ([], now))
        if len(askers) >= self._machine.config.limits.waiters_per_task:
            refusal = Status(Code.RESOURCE_EXHAUSTED, f"{len(askers)} calls wait for the stacks of process {task_id}; expected fewer")
            self._machine.replies.append(Completion(call, None, refusal))
            return
        askers.append(call)
        if len(askers) > 1:  # it is being asked already: its one answer is for all
            return
        self._ask_count += 1
        asked.ask = self._ask_count
        self._asks[asked.ask] = (askers, now + _STACKS_TIMEOUT_S)
        ask = session_pb2.Ask(id=asked.ask, what="stacks")
        asked.stream.write(session_pb2.ServerFrame(ask=ask).SerializeToString())

    def _answered(self, session: Session, answer: session_pb2.Answer) -> None:
        if answer.id != session.ask:
            return  # it was not asked that
        askers, _ = self._asks.pop(answer.id, ([], 0.0))
        body = session_pb2.StacksResponse(stacks=answer.body).SerializeToString()
        self._machine.replies += [Completion(call, body, None) for call in askers]

    # ---- Telling what changed ------------------------------------------------------------------------------------------------------

    def note_changes(self, now: float) -> None:
        """Sees whether there is something to tell, and when: at most once in DELTA_INTERVAL_S."""
        if self._machine.roster.version > self._told_version:
            self._tell_soon(now)

    def _tell_soon(self, now: float) -> None:
        if self._tell_at == math.inf:
            self._tell_at = max(now, self._told_at + DELTA_INTERVAL_S)

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self._tell_at, min(due for _, due in self._asks.values())) if self._asks else self._tell_at

    def tick(self, now: float) -> None:
        """Tells every Session what has changed, drops those that do not read, and gives up on asks without an answer."""
        for number, (askers, due) in list(self._asks.items()):
            if due <= now:
                del self._asks[number]
                refusal = Status(Code.DEADLINE_EXCEEDED, f"the process did not answer within {_STACKS_TIMEOUT_S:.0f} s")
                self._machine.replies += [Completion(call, None, refusal) for call in askers]
        if now < self._tell_at:
            return
        self._tell_at, self._told_at = math.inf, now
        self._told_version = self._machine.roster.version
        frames: dict[int, bytes] = {}
        for session in list(self._sessions.values()):
            self._tell(session, frames)

    def _tell(self, session: Session, frames: dict[int, bytes]) -> None:
        roster = self._machine.roster
        if session.stream.backlog_bytes > self._machine.config.limits.backlog_bytes:
            most = self._machine.config.limits.backlog_bytes
            self._end(
                session.stream,
                Code.RESOURCE_EXHAUSTED,
                f"the client has left {session.stream.backlog_bytes} bytes unread; expected {most} at most",
            )
            return
        if session.version == roster.version:
            return
        frame = frames.get(session.version)
        if frame is None:
            tasks = [_told(task) for task in roster.changed_since(session.version)]
            delta = session_pb2.Delta(version=roster.version, full=session.version < 0, tasks=tasks)
            frame = frames[session.version] = session_pb2.ServerFrame(delta=delta).SerializeToString()
        session.version = roster.version
        session.stream.write(frame)

    # ---- Ends ----------------------------------------------------------------------------------------------------------------------

    def closed(self, stream: Stream) -> None:
        """Forgets a stream that has ended, with the calls that wait on it."""
        session, stream.session = stream.session, None
        if session is None:
            return
        for call in list(session.calls.values()):
            self._machine.drop(call)
        if self._sessions.get(session.task_id) is session:
            del self._sessions[session.task_id]

    def _end(self, stream: Stream, code: Code, message: str) -> None:
        self.closed(stream)
        stream.finish(code, message)

    def close_all(self, refusal: Status) -> None:
        """Ends all streams."""
        for session in list(self._sessions.values()):
            self._end(session.stream, refusal.code, refusal.message)


def _told(task: Task) -> session_pb2.Task:
    info: coordination_pb2.TaskInfo = task_info(task, session=True)
    return session_pb2.Task(info=info, host=task.host, pid=task.pid)

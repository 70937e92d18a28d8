"""The service's side of our Sessions: frames in, replies and deltas out. One thread, no sockets."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from holdfast.proto import session_pb2

from ..core.calls import Call, Line
from ..core.machine import Machine
from ..core.status import Code, Missing, Status, clip
from ..core.task_table import ParticipantsError, TaskTable
from ..limits import Config, Limits
from ..names import MISSING_TYPE, REPORT_AGAIN
from ..task_bits import bytes_of
from .admission import TaskOwners
from .defects import Defects
from .job_status import left_stacks
from .profiles import (
    RPCS_A,
    Requested,
    Rpc,
    message_of,
    payloads,
    profile,
    report_error,
    task_info,
)

log = logging.getLogger("holdfast.coordination")

DELTA_INTERVAL_S = 0.1
DELTA_S_PER_SESSION = 0.0001
"""To write one frame takes a quarter of this: what changes all the time, as while thousands join,
keeps the service busy for a quarter of the time at most.
"""
GATHERING_S_PER_SESSION = 0.001
"""While a job gathers each change is that one more has come: each client hears of a thousand as a
few changes, not as a hundred.
"""
_MOST_LISTED = 64  # tasks of a delta that is not deflated
_STACKS_TIMEOUT_S = 20.0


class SessionStream(Protocol):
    """The stream of one Session, as a transport implements it; `bind` sets its `session`.

    `key` is the caller's, in a secured service; `names` are the alternative names in its
    certificate. `write` writes one message: what is `shared` with others' follows the frame, and is
    not copied before the message is on its way. `finish` ends the stream after what has been
    written.
    """

    session: Session | None
    key: str

    def bind(self, session: Session | None) -> None: ...
    def names(self) -> Sequence[bytes]: ...
    def write(self, frame: bytes, shared: bytes = b"") -> None: ...
    def finish(self, code: int, message: str) -> None: ...
    @property
    def backlog_bytes(self) -> int: ...


class ResponseWriter(Protocol):
    """Writes the response of one unary call, as a transport implements it. `succeed` or `fail` is
    called, once.

    `key` and `names` are as in SessionStream; `timed`: the caller waits for a limited time.
    """

    key: str
    timed: bool

    def names(self) -> Sequence[bytes]: ...
    def succeed(self, body: bytes) -> None: ...
    def fail(self, code: int, message: str, details: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class Session:
    """A Session that a task has opened."""

    stream: SessionStream
    task_id: int
    incarnation: int
    life: int  # version of the task table when it began
    version: int = -1
    query: int = 0  # the number of the last Ask that was sent
    second: float = 0.0
    frames: int = 0
    calls: dict[int, SessionCall] = field(default_factory=dict)

    def count(self, limits: Limits, now: float) -> str | None:
        """Counts a request; returns why it is one too many, None while it is not."""
        if now - self.second >= 1.0:
            self.second = now
            self.frames = 0
        self.frames += 1
        if self.frames > limits.calls_per_second:
            most = limits.calls_per_second
            return f"process {self.task_id} makes more than {most} calls in a second; slow down"
        if len(self.calls) >= limits.waiters_per_task:
            return f"process {self.task_id} has {len(self.calls)} calls waiting; expected fewer"
        return None

    def ask(self, number: int) -> None:
        """Sends an Ask for stacks."""
        self.query = number
        ask = session_pb2.Ask(id=number, what="stacks")
        self.stream.write(session_pb2.ServerFrame(ask=ask).SerializeToString())

    def write_delta(self, frame: bytes, version: int) -> None:
        """Sends the changes of tasks up to a version."""
        self.version = version
        self.stream.write(b"", frame)


@dataclass(slots=True, eq=False, kw_only=True)
class SessionCall(Requested):
    """One request of a Session."""

    owner: Session
    reply_to: int

    def answer(self, machine: Machine) -> None:
        """Sends its answer as a frame."""
        self.owner.calls.pop(self.reply_to, None)
        stream = self.owner.stream
        unread_bytes = stream.backlog_bytes
        # A client that calls and never reads would fill the memory of a host that others need.
        if unread_bytes and unread_bytes > 2 * machine.config.limits.message_bytes:
            sentence = f"the client has left {unread_bytes} bytes of replies unread"
            stream.finish(Code.RESOURCE_EXHAUSTED, sentence)
            return
        out = session_pb2.ServerFrame()
        reply = out.reply
        reply.id = self.reply_to
        status = self.status
        rest = b""
        if status is not None:
            rest = machine.encodings.of(_failure, status, lambda: _failure(status))
        elif self.rpc.shared:
            encode = self.rpc.encode
            rest = machine.encodings.of(
                (encode, _frame),
                self.value,
                lambda: _frame(session_pb2.Reply(body=encode(machine, self).SerializeToString())),
            )
        else:
            reply.body = self.rpc.encode(machine, self).SerializeToString()
        stream.write(out.SerializeToString(), rest)


def _frame(reply: session_pb2.Reply) -> bytes:
    return session_pb2.ServerFrame(reply=reply).SerializeToString()


def _failure(status: Status) -> bytes:
    """Returns the frame of a reply without its id: a message that follows another of its kind is
    merged into it, so that one copy serves all the calls that fail together.
    """
    reply = session_pb2.Reply(code=int(status.code), message=message_of(status))
    for name, payload in payloads(status).items():
        reply.payloads[name] = payload
    if status.missing:
        missing = session_pb2.Missing(
            tasks=map(_missing_task, status.missing),
            everyone=zlib.compress(bytes_of(status.absent)) if status.absent else b"",
        )
        reply.payloads[MISSING_TYPE] = missing.SerializeToString()
    return _frame(reply)


def _cut_report(report: session_pb2.ReportRequest, config: Config) -> None:
    """Cuts a report to its bounds: what no field holds, and what is too much."""
    limits = config.limits
    report.DiscardUnknownFields()
    if report.trouble:
        cut = clip(report.trouble, limits.error_bytes)
        report.MergeFrom(session_pb2.ReportRequest(trouble=cut))
    if report.HasField("root"):
        root = report.root
        root.MergeFrom(session_pb2.CheckpointRoot(path=clip(root.path, limits.root_path_bytes)))
        del root.steps[: -limits.root_steps]
        for step in root.steps:
            _cut_step(step, config)


def _cut_step(step: session_pb2.CheckpointStep, config: Config) -> None:
    limits = config.limits
    del step.copies[config.num_tasks :]
    for each in step.copies:
        del each.processes[limits.root_copies :]
    names = sorted(step.metrics)[: limits.root_metrics]
    metrics = {clip(name, limits.metric_bytes): step.metrics[name] for name in names}
    step.metrics.clear()
    step.metrics.update(metrics)
    step.best[:] = [clip(name, limits.metric_bytes) for name in step.best[: limits.root_metrics]]


def _missing_task(missing: Missing) -> session_pb2.MissingTask:
    return session_pb2.MissingTask(
        task_id=missing.task_id,
        host=missing.host,
        silent_s=-1.0 if missing.silent_s is None else missing.silent_s,
        lost=missing.lost,
        progress=missing.progress,
    )


def _report(machine: Machine, call: Requested, again: bool = False) -> None:
    _cut_report(call.request, machine.config)
    machine.report(call, call.request, again=again)


def _set_keys(machine: Machine, call: Requested) -> None:
    machine.keys.set_many(call, [(entry.key, entry.value) for entry in call.request.entries])


_NOBODY: frozenset[int] = frozenset()  # made of no needs it would take longer than the call
_OWN_RPCS = profile(
    session_pb2,
    {"Report": Rpc(_report), "ReportError": Rpc(report_error), "SetKeys": Rpc(_set_keys)},
)
_AGAIN = {REPORT_AGAIN: replace(_OWN_RPCS["Report"], run=partial(_report, again=True))}
_RPCS = RPCS_A | _OWN_RPCS | _AGAIN
_UNKNOWN = Rpc(lambda machine, call: None)


@dataclass(frozen=True, slots=True)
class _Query:
    """An Ask that a process was sent: the calls that wait for its answer, and until when."""

    task_id: int
    due: float
    askers: Line = field(default_factory=Line)


class SessionStreams:
    """All Sessions of a job: at most one for each task."""

    def __init__(
        self,
        machine: Machine,
        defects: Defects,
        owners: TaskOwners | None = None,
    ) -> None:
        self._machine = machine
        self._defects = defects
        self._owners = owners
        self._sessions: dict[int, Session] = {}
        # incarnation and number of each task's latest Open, also of one that has left
        self._latest: dict[int, tuple[int, int]] = {}
        self._sent_version = 0
        self._send_at = math.inf
        self._sent_at = -math.inf
        self._queries: dict[int, _Query] = {}
        self._query_count = 0

    # --- Frames

    def frame(self, stream: SessionStream, body: bytes, now: float) -> None:
        """Takes one frame of a client."""
        try:
            frame = session_pb2.ClientFrame.FromString(body)
        except DecodeError:
            self.end(stream, Code.INVALID_ARGUMENT, "the frame is not a ClientFrame")
            return
        kind = frame.WhichOneof("frame")
        # No call comes before Open: who calls is known by the Session, not by what a request says.
        session = stream.session
        if session is None:
            if kind == "open":
                self._open(stream, frame.open, now)
            else:
                self.end(stream, Code.FAILED_PRECONDITION, "a Session's first frame is Open")
            return
        self._machine.seen(session.task_id, now)
        if kind == "request":
            self._request(session, frame.request, now)
        elif kind == "cancel":
            self._cancel(session, frame.cancel.id)
        elif kind == "answer":
            self._take_answer(session, frame.answer)
        elif kind == "open":
            self.end(stream, Code.FAILED_PRECONDITION, "this Session is open already")

    def _open(self, stream: SessionStream, opening: session_pb2.Open, now: float) -> None:
        status = (
            self._check_job(opening)
            or self._check_owner(stream, opening)
            or self._check_order(opening)
        )
        if status is None:
            status = self._machine.registration.open_session(
                opening.process_id, opening.incarnation, opening.host, opening.pid, now=now
            )
        if status is not None:
            log.warning("a Session was refused: %s", status.message)
            stream.finish(status.code, status.message)
            return
        # The client came back before its old connection was seen to break: only one may be read,
        # or a late frame of the old one would count as a sign of life.
        older = self._sessions.pop(opening.process_id, None)
        if older is not None:
            sentence = f"process {opening.process_id} has opened another Session"
            self.end(older.stream, Code.ABORTED, sentence)
        life = self._machine.task_table.life_of(opening.process_id, opening.incarnation)
        session = Session(stream, opening.process_id, opening.incarnation, life)
        stream.bind(session)
        self._sessions[session.task_id] = session
        self._latest[session.task_id] = (session.incarnation, opening.number)
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
        self._schedule_delta(now)

    def _check_owner(self, stream: SessionStream, opening: session_pb2.Open) -> Status | None:
        if self._owners is None:
            return None
        has_stream = opening.process_id in self._sessions
        return self._owners.may_join(opening.process_id, stream.key, stream.names, has_stream)

    def _check_order(self, opening: session_pb2.Open) -> Status | None:
        """Refuses what its client gave up before the latest Session."""
        incarnation, number = self._latest.get(opening.process_id, (0, 0))
        if incarnation != opening.incarnation or number <= opening.number:
            return None
        sentence = f"process {opening.process_id} has opened another Session since"
        return Status(Code.ABORTED, sentence)

    def _check_job(self, opening: session_pb2.Open) -> Status | None:
        config = self._machine.config
        theirs = (opening.job, opening.attempt)
        both_say = opening.job and config.job
        if both_say and theirs != (config.job, config.attempt):
            expected = f"job {config.job!r}, attempt {config.attempt}"
            found = f"job {opening.job!r}, attempt {opening.attempt}"
        elif opening.num_processes not in (0, config.num_tasks):
            expected = f"a job of {config.num_tasks} processes"
            found = f"one of {opening.num_processes}"
        else:
            return None
        return Status(
            Code.PERMISSION_DENIED,
            f"this service coordinates {expected}; process {opening.process_id} belongs to {found}",
        )

    def _request(self, session: Session, request: session_pb2.Request, now: float) -> None:
        machine = self._machine
        method = request.method
        rpc = _RPCS.get(method, _UNKNOWN)
        timeout_ms = request.timeout_ms
        call = SessionCall(
            machine.answers,
            session.task_id,
            now,
            incarnation=session.incarnation,
            life=session.life,
            session=True,
            deadline=now + timeout_ms / 1000 if timeout_ms > 0 else math.inf,
            depends_on=frozenset(request.needs) if request.needs else _NOBODY,
            number=request.number,
            participants=request.participants,
            rpc=rpc,
            owner=session,
            reply_to=request.id,
        )
        too_many = session.count(machine.config.limits, now)
        # Before it runs: an answer that comes at once takes it out again.
        session.calls[request.id] = call
        if too_many is not None:
            call.refuse(Code.RESOURCE_EXHAUSTED, too_many)
            return
        if rpc is _UNKNOWN:
            call.refuse(Code.UNIMPLEMENTED, f"there is no method {method[:100]!r}")
            return
        try:
            call.run(machine, request.body)
        except DecodeError:
            sentence = f"{method}: the body is not a message of this method"
            call.refuse(Code.INVALID_ARGUMENT, sentence)
        except ParticipantsError as error:
            call.refuse(Code.INVALID_ARGUMENT, str(error))
        except Exception as error:
            call.fail(self._defects.note(method[:100], error))

    def _cancel(self, session: Session, number: int) -> None:
        call = session.calls.get(number)
        if call is not None and not call.done:
            # At a barrier the call has arrived, and that stays.
            call.refuse(Code.CANCELLED, "the caller took the call back")

    # --- Queries to a client

    def ask_stacks(self, machine: Machine, call: Requested) -> None:
        """Sends a process an Ask for the stacks of its threads."""
        task_id = call.request.task_id
        asked = self._sessions.get(task_id)
        if asked is None:
            sentence = f"process {task_id} has no Session now, so it cannot be asked"
            self._tell_left(call, task_id, Status(Code.UNAVAILABLE, sentence))
            return
        query = self._queries.get(asked.query)
        if query is None:
            query = _Query(task_id, call.came + _STACKS_TIMEOUT_S)
            self._query_count += 1
            self._queries[self._query_count] = query
            asked.ask(self._query_count)
        # An Ask that is under way has one answer, for all who ask meanwhile.
        waiting = len(query.askers)
        if waiting < self._machine.config.limits.waiters_per_task:
            query.askers.enter(call)
            return
        sentence = f"{waiting} calls wait for the stacks of process {task_id}; expected fewer"
        call.refuse(Code.RESOURCE_EXHAUSTED, sentence)

    def _take_answer(self, session: Session, answer: session_pb2.Answer) -> None:
        if answer.id != session.query:
            return  # to no Ask that this process was sent
        query = self._queries.pop(answer.id, None)
        if query is not None:
            left = left_stacks(self._machine, session.task_id)
            stacks = b"\n".join(filter(None, (answer.body, left)))
            query.askers.succeed(session_pb2.StacksResponse(stacks=stacks))

    def _tell_left(self, askers: Call | Line, task_id: int, status: Status) -> None:
        """Answers with what the process's watchdog has left, an error where that is nothing."""
        left = left_stacks(self._machine, task_id)
        if left:
            askers.succeed(session_pb2.StacksResponse(stacks=left))
        else:
            askers.fail(status)

    # --- Deltas

    def note_changes(self, now: float) -> None:
        """Schedules a delta where tasks have changed: at most one in DELTA_INTERVAL_S. Ends the
        Sessions of those that were given up.
        """
        if self._machine.task_table.version > self._sent_version:
            self._schedule_delta(now)
        for task_id in self._machine.take_fenced():
            session = self._sessions.get(task_id)
            task_table = self._machine.task_table
            task = task_table.tasks[task_id]
            # the next life may have opened one meanwhile
            if session is not None and session.incarnation in task.former:
                status = task_table.fenced(task)
                self.end(session.stream, status.code, status.message)

    def _schedule_delta(self, now: float) -> None:
        # At most ten deltas a second: where a thousand processes join, each delta holds many.
        gathered = self._machine.registration.gathered
        each_s = DELTA_S_PER_SESSION if gathered else GATHERING_S_PER_SESSION
        interval_s = max(DELTA_INTERVAL_S, len(self._sessions) * each_s)
        # The end of the gathering, and ends of Sessions, bring what is due nearer.
        self._send_at = min(self._send_at, max(now, self._sent_at + interval_s))

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        if not self._queries:
            return self._send_at
        return min(self._send_at, *(query.due for query in self._queries.values()))

    def tick(self, now: float) -> None:
        """Sends every Session what has changed, drops those that do not read, and gives up on
        queries without an answer.
        """
        for number, query in list(self._queries.items()):
            if query.due <= now:
                del self._queries[number]
                sentence = f"the process did not answer within {_STACKS_TIMEOUT_S:.0f} s"
                self._tell_left(
                    query.askers, query.task_id, Status(Code.DEADLINE_EXCEEDED, sentence)
                )
        if now < self._send_at:
            return
        self._send_at = math.inf
        self._sent_at = now
        self._sent_version = self._machine.task_table.version
        frames: dict[int, bytes] = {}  # by the version that a Session has
        for session in list(self._sessions.values()):
            self._send_delta(session, frames)

    def _send_delta(self, session: Session, frames: dict[int, bytes]) -> None:
        unread_bytes = session.stream.backlog_bytes
        most = self._machine.config.limits.backlog_bytes
        if unread_bytes > most:
            sentence = f"the client has left {unread_bytes} bytes unread; expected {most} at most"
            self.end(session.stream, Code.RESOURCE_EXHAUSTED, sentence)
            return
        version = self._machine.task_table.version
        if session.version == version:
            return
        # Thousands of Sessions know the same version: what has changed since is encoded once.
        if session.version not in frames:
            frames[session.version] = _delta_since(self._machine.task_table, session.version)
        session.write_delta(frames[session.version], version)

    # --- Ends

    def closed_by_client(self, stream: SessionStream, now: float) -> None:
        """Forgets a stream that its client, or its client's kernel, has ended. Where the task has
        no other, it is suspect.
        """
        session = stream.session
        if session is not None and self._sessions.get(session.task_id) is session:
            self._machine.suspect(session.task_id, now)
        self.closed(stream)

    def closed(self, stream: SessionStream) -> None:
        """Forgets a stream that has ended, with the calls that wait on it."""
        session = stream.session
        if session is None:
            return
        stream.bind(None)
        for call in session.calls.values():
            call.drop()
        query = self._queries.pop(session.query, None)
        if query is not None:
            sentence = f"process {session.task_id} has ended its Session, so it cannot answer"
            self._tell_left(query.askers, query.task_id, Status(Code.UNAVAILABLE, sentence))
        # A Session that opened meanwhile has taken the place of this one: its task stays attached.
        if self._sessions.get(session.task_id) is session:
            del self._sessions[session.task_id]
            self._machine.detach(session.task_id)

    def end(self, stream: SessionStream, code: Code, message: str) -> None:
        """Ends a stream, with why."""
        self.closed(stream)
        stream.finish(code, message)

    def close_all(self, status: Status) -> None:
        """Ends all Sessions."""
        for session in list(self._sessions.values()):
            self.end(session.stream, status.code, status.message)


def _delta_since(task_table: TaskTable, version: int) -> bytes:
    tasks = [
        session_pb2.Task(info=task_info(task, session=True), host=task.host, pid=task.pid)
        for task in task_table.changed_since(version)
    ]
    delta = session_pb2.Delta(version=task_table.version)
    if len(tasks) <= _MOST_LISTED:
        delta.tasks.extend(tasks)
    else:
        packed = session_pb2.Tasks(tasks=tasks).SerializeToString()
        delta.packed = zlib.compress(packed, level=1)
    return session_pb2.ServerFrame(delta=delta).SerializeToString()

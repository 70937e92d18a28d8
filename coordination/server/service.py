"""The service between a transport and the state machine: reads requests, drives the machine, sends
its answers. One thread, no sockets.

A transport hands in calls (`unary`) and frames (`stream_frame`, `stream_closed`), calls `tick` when
`next_due` says so, and `flush` after each batch of events. The journal is written in `flush`,
before any answer of the batch is sent.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from holdfast.proto import session_pb2

from ..core.machine import Machine
from ..core.status import Code, Status, clip
from ..limits import Config
from ..names import (
    END_ATTEMPT,
    GROW_KEY,
    NEXT_KEY,
    NOBODY,
    OVER_FOLDER,
    REPORT_EVENT,
    REPORT_EXIT,
    REPORT_LAUNCHER,
    SESSION,
    STACKS,
    STATUS,
    Claim,
)
from .admission import TaskOwners
from .defects import Defects
from .job_status import events_of, status_of
from .profile_d import RPCS_D
from .profiles import RPCS, Requested, Rpc, encode_message, message_of, status_details
from .sessions import ResponseWriter, SessionStream, SessionStreams

log = logging.getLogger("holdfast.coordination")

_MOST_PARTS = 16  # of a goodput
_MOST_ATTEMPTS = 64  # of a launcher's word
_MOST_NAMED = 64  # processes of one of them
_LAUNCHER_TEXTS = ("state", "why", "waiting_for", "command", "folder")


@dataclass(slots=True, eq=False, kw_only=True)
class UnaryCall(Requested):
    """A unary call; transports keep it to drop it when its client goes away."""

    writer: ResponseWriter

    def answer(self, machine: Machine) -> None:
        """Sends its answer."""
        status = self.status
        if status is None:
            self.writer.succeed(self.encoded(machine))
            return
        late = status.code is Code.DEADLINE_EXCEEDED
        code = self.rpc.late if late else status.code
        self.writer.fail(code, message_of(status), status_details(status))


class Journal(Protocol):
    """Where the machine's state survives the process."""

    @property
    def state(self) -> str: ...
    def write(self, machine: Machine) -> None: ...
    def close(self, finished: bool) -> None: ...


class Service:
    """Serves one job. `rpcs` are its unary calls, by path."""

    def __init__(
        self,
        machine: Machine,
        clock: Callable[[], float],
        journal: Journal | None = None,
        *,
        secured: bool = False,
    ) -> None:
        self.machine = machine
        self._clock = clock
        self._life = secrets.randbits(62) + 1
        self._journal = journal
        self._owners = TaskOwners(machine) if secured else None
        self._defects = Defects(machine.events, clock)
        self.sessions = SessionStreams(machine, self._defects, self._owners)
        self.rpcs = RPCS | RPCS_D | self._own_rpcs()
        self.calls = 0
        self._turned_away = 0
        self._goodput_s: dict[str, float] = {}
        self._launcher = session_pb2.Launcher()
        self._finished = False
        self._deserted_at: float | None = None
        self._publish_at = math.inf  # never, unless another thread wants the status
        self._published = session_pb2.StatusResponse()

    def _own_rpcs(self) -> dict[str, Rpc]:
        """Returns the calls of launchers and of those who look. To end something takes the key of a
        process.
        """
        anybody = partial(Rpc, claim=lambda request: Claim(None))
        return {
            STATUS: anybody(
                self._answer_status, encode_message, parse=session_pb2.StatusRequest.FromString
            ),
            STACKS: anybody(
                self.sessions.ask_stacks,
                encode_message,
                parse=session_pb2.StacksRequest.FromString,
                waits=True,
            ),
            REPORT_EVENT: anybody(
                self._report_event, parse=session_pb2.ReportEventRequest.FromString
            ),
            REPORT_LAUNCHER: anybody(
                self._report_launcher, parse=session_pb2.ReportLauncherRequest.FromString
            ),
            REPORT_EXIT: Rpc(_report_exit, parse=session_pb2.ReportExitRequest.FromString),
            END_ATTEMPT: Rpc(_end_attempt, parse=session_pb2.EndAttemptRequest.FromString),
        }

    def publish_status(self) -> None:
        """Begins to publish the status once a second for `published_status`."""
        self._published = self.status()
        self._publish_at = 0.0

    @property
    def config(self) -> Config:
        """The settings of the service."""
        return self.machine.config

    def unary(self, path: str, body: bytes, writer: ResponseWriter) -> UnaryCall | None:
        """Takes a unary call; returns it where it may wait."""
        self.calls += 1
        try:
            taken = self._unary(path, body, writer)
        except Exception as error:
            taken = self._defects.note(path.rpartition("/")[2], error)
        if isinstance(taken, Status):
            writer.fail(taken.code, message_of(taken), status_details(taken))
            return None
        return taken

    def _unary(self, path: str, body: bytes, writer: ResponseWriter) -> UnaryCall | Status:
        """Takes a call, or returns why it is none."""
        rpc = self.rpcs.get(path)
        if rpc is None:
            sentence = (
                f"{path} is not served here; expected one of profiles A, B and D, or {SESSION}"
            )
            return Status(Code.UNIMPLEMENTED, sentence, from_service=False)
        try:
            request = rpc.parse(body)
        except DecodeError:
            sentence = f"{path}: the request is not a message of this rpc"
            return Status(Code.INVALID_ARGUMENT, sentence, from_service=False)
        now = self._clock()
        machine = self.machine
        claim = rpc.claim(request)
        task_id = self._admit(rpc, writer, claim, now)
        if isinstance(task_id, Status):
            return task_id
        incarnation = claim.incarnation
        life = 0
        if (task := machine.task_table.get(task_id)) is not None:
            incarnation = incarnation or task.agent  # profiles B and D do not say it
            life = machine.task_table.life_of(task_id, incarnation)
        call = UnaryCall(
            machine.answers,
            task_id,
            now,
            incarnation=incarnation,
            life=life,
            rpc=rpc,
            request=request,
            writer=writer,
        )
        if task is None and task_id != NOBODY and not rpc.registers:
            call.fail(machine.task_table.no_such_task(task_id))
        else:
            rpc.run(machine, call)
        return call

    def _admit(self, rpc: Rpc, writer: ResponseWriter, claim: Claim, now: float) -> int | Status:
        """Returns the task that a call comes from, or why it is not let in. The owner comes first:
        a stranger's call is no sign of life.
        """
        task_id, incarnation, service_incarnation = claim
        named = task_id
        if named is None:
            named = self.machine.task_table.by_agent.get(incarnation)
        if self._owners is not None and named is not None:
            if rpc.registers:
                refusal = self._owners.may_join(named, writer.key, writer.names)
            else:
                refusal = self._owners.may_call(named, writer.key, writer.names)
            if refusal is not None:
                return refusal
        if service_incarnation is not None:
            return self.machine.identify(
                task_id, incarnation, service_incarnation, now, lost=rpc.lost
            )
        return NOBODY if task_id is None else task_id

    def _answer_status(self, machine: Machine, call: Requested) -> None:
        request = call.request
        is_known = request.service_life == self._life
        since = machine.started + request.since_up_s if is_known else -math.inf
        status = self.status(since)
        if request.with_events:
            wall_offset_s = time.time() - call.came
            status.events.extend(events_of(machine, request.events_after, wall_offset_s))
        call.succeed(status)

    def _report_event(self, machine: Machine, call: Requested) -> None:
        """Takes a line of a launcher's history."""
        request = call.request
        at = call.came
        if request.unix_s:
            at = min(at, request.unix_s - (time.time() - at))
        most = self.config.limits.error_bytes
        machine.events.note(clip(request.kind, 32), clip(request.text, most), at)
        call.succeed()

    def _report_launcher(self, machine: Machine, call: Requested) -> None:
        """Takes what a launcher knows of the job, and its account of so many parts at most."""
        seconds = call.request.seconds
        self._goodput_s = {clip(name, 32): seconds[name] for name in sorted(seconds)[:_MOST_PARTS]}
        launcher = call.request.launcher
        most = self.config.limits.error_bytes
        for name in _LAUNCHER_TEXTS:
            setattr(launcher, name, clip(getattr(launcher, name), most))
        del launcher.attempts[:-_MOST_ATTEMPTS]
        for attempt in launcher.attempts:
            attempt.MergeFrom(session_pb2.Attempt(why=clip(attempt.why, most)))
            del attempt.replaced[_MOST_NAMED:]
        self._launcher = launcher
        call.succeed()

    def status(self, since: float = -math.inf) -> session_pb2.StatusResponse:
        """Returns what `holdfast status` shows; the tasks that have changed since a time."""
        return status_of(
            self.machine,
            self._clock(),
            since,
            calls=self.calls,
            service_life=self._life,
            journal="" if self._journal is None else self._journal.state,
            defects=self._defects.sentences,
            goodput_s=self._goodput_s,
            turned_away=self._turned_away,
            launcher=self._launcher if self._launcher.state else None,
        )

    def note_turned_away(self, count: int) -> None:
        """Takes how many connections the port has closed that had not said whose they are."""
        self._turned_away = count

    def published_status(self) -> session_pb2.StatusResponse:
        """Returns the status that was last published, at most a second old. Safe from any
        thread.
        """
        return self._published

    def drop(self, call: UnaryCall) -> None:
        """Forgets a call whose client has gone away. One at a barrier stays: its task has
        arrived.
        """
        if call.rpc.waits:
            call.drop()
        if not call.rpc.kept or call.writer.timed:
            return
        # An agent that waits for as long as it takes has most likely died. One beside a Session
        # says nothing of the task, nor does one of a former life.
        task = self.machine.task_table.get(call.task_id)
        if task is not None and not task.session and task.agent == call.incarnation:
            self.machine.suspect(task.task_id, self._clock())

    # --- Sessions

    def stream_frame(self, stream: SessionStream, body: bytes) -> None:
        """Takes one frame of a Session."""
        self.calls += 1
        try:
            self.sessions.frame(stream, body, self._clock())
        except Exception as error:
            status = self._defects.note("a frame of a Session", error)
            self.sessions.end(stream, status.code, status.message)

    def stream_closed(self, stream: SessionStream) -> None:
        """Forgets a Session's stream that has ended; its task lives on for a while, and may open
        another.
        """
        self.sessions.closed_by_client(stream, self._clock())

    # --- Time and answers

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self.machine.next_due(), self.sessions.next_due())

    def tick(self) -> None:
        """Lets time pass."""
        now = self._clock()
        self.machine.tick(now)
        if self._journal is None:
            self.machine.changes.clear()
        self.sessions.tick(now)
        if now >= self._publish_at:
            self._publish_at = now + 1.0
            try:
                self._published = self.status()
            except Exception as error:
                self._defects.note("the status for Prometheus", error)

    def flush(self) -> None:
        """Writes the journal, then sends all answers of the machine."""
        machine = self.machine
        if self._journal is not None:
            self._journal.write(machine)
        while answers := machine.take_answers():
            for call in answers:
                self._answer(call)
        self.sessions.note_changes(self._clock())

    def _answer(self, call: Any) -> None:
        try:
            call.answer(self.machine)
        except Exception as error:
            status = self._defects.note("an answer", error)
            if call.status is None:  # else it is one call without an answer
                call.fail(status)

    @property
    def connected(self) -> int:
        """How many processes are connected."""
        return self.machine.task_table.connected_count

    def over(self, linger_s: float, startup_timeout_s: float) -> str | None:
        """Returns why the service should end, None while it should not. A time of 0 is never."""
        now = self._clock()
        machine = self.machine
        self._finished = machine.all_shut_down()
        if self._finished:
            return "every process has shut down"
        since = machine.over_since()
        if since is not None and linger_s and now - since > linger_s:
            return f"every process has been gone for {now - since:.0f} s"
        if not machine.deserted():
            self._deserted_at = None
        elif self._deserted_at is None:
            self._deserted_at = now
        elif linger_s and now - self._deserted_at > linger_s:
            alone_s = now - self._deserted_at
            return f"the job never gathered, and nobody of it has been there for {alone_s:.0f} s"
        never = all(task.last_seen is None for task in machine.task_table.tasks)
        if never and startup_timeout_s and now - machine.started > startup_timeout_s:
            return f"no process came within {startup_timeout_s:.0f} s"
        return None

    def close(self) -> None:
        """Ends all Sessions with CANCELLED; calls of agents are still answered."""
        self.sessions.close_all(Status(Code.CANCELLED, "the coordination service ends"))

    def close_journal(self) -> None:
        """Releases the journal, once nothing is answered any more."""
        if self._journal is not None:
            self._journal.close(finished=self._finished)
            self._journal = None


def _report_exit(machine: Machine, call: Requested) -> None:
    """Takes a launcher's word that a process has ended."""
    machine.report_exit(call.task_id, call.request.exit_code, call.came)
    call.succeed()


def _end_attempt(machine: Machine, call: Requested) -> None:
    """Takes a launcher's word that it ends the processes, or gives them notice, and why, or is to
    grow: keys hold it, for whoever gets a signal, or listens.
    """
    request = call.request
    most = machine.config.limits.error_bytes
    why = clip(request.why, most)
    if request.notice:
        machine.keys.put(f"{OVER_FOLDER}/notice", clip(request.notice, most).encode())
    elif request.grow:
        machine.keys.put(GROW_KEY, b"1")
    else:
        machine.keys.put(f"{OVER_FOLDER}/over", why.encode())
    if request.HasField("next"):
        machine.keys.put(NEXT_KEY, request.next.SerializeToString())
        machine.registration.end_attempt(why)
    call.succeed()

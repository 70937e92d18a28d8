"""The service between a transport and the machine: it reads requests, drives the machine, and sends the replies. One thread, no sockets.

A transport hands in calls (`unary`) and frames (`stream_frame`, `stream_closed`), calls `tick` when `next_due` says so, and
`flush` after each batch of events. The journal is written in `flush`, before any reply of the batch goes out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from holdfast.proto import session_pb2

from ..core.machine import Machine
from ..core.status import Code, Completion, Status
from ..limits import Config
from .admission import Owners
from .profile_d import RPCS_D
from .profiles import RPCS, Caller, Rpc, message_of, status_details
from .report import status_of
from .sessions import SessionCall, StacksCall, Stream, Streams, Wire

log = logging.getLogger("holdfast.coordination")

_RPCS = RPCS | RPCS_D
SESSION = "/holdfast.Coordination/Session"
STATUS = "/holdfast.Coordination/GetStatus"
STACKS = "/holdfast.Coordination/GetStacks"


class UnaryCall:
    """A unary call that the machine holds; transports keep it to drop it when its client goes away."""

    __slots__ = ("caller", "rpc", "wire")

    def __init__(self, wire: Wire, rpc: Rpc, caller: Caller) -> None:
        self.wire, self.rpc, self.caller = wire, rpc, caller

    @property
    def watch(self) -> bool:
        """Says whether it matters that the client goes away. At a barrier it does not: the task has come, and stays so."""
        return self.rpc.waits

    def settle(self, machine: Machine, reply: Completion) -> None:
        """Sends the machine's reply."""
        if reply.refusal is not None:
            self.wire.fail(reply.refusal.code, message_of(reply.refusal), status_details(reply.refusal))
        else:
            self.wire.succeed(self.rpc.encode(machine, reply.value, self.caller))


class Journal(Protocol):
    """Where the machine's state survives the process."""

    @property
    def path(self) -> Path: ...
    def write(self, machine: Machine) -> None: ...
    def close(self, finished: bool) -> None: ...


class Service:
    """Serves one job."""

    def __init__(self, machine: Machine, clock: Callable[[], float], journal: Journal | None = None, *, secured: bool = False) -> None:
        self.machine, self._clock, self._journal = machine, clock, journal
        self._owners = Owners(machine) if secured else None
        self.streams = Streams(machine, self._owners)
        self.calls = 0
        self._finished = False
        self._leave_status_at = math.inf  # nobody asks from another thread
        self._left_status = session_pb2.StatusResponse()

    def leave_status(self) -> None:
        """Begins to leave a status once a second for `status_from_thread`."""
        self._left_status, self._leave_status_at = self.status(), 0.0

    @property
    def config(self) -> Config:
        """Is what the service was started with."""
        return self.machine.config

    @property
    def journaled(self) -> bool:
        """Says whether replies wait for a journal: then many events at a time cost less."""
        return self._journal is not None

    def unary(self, path: str, body: bytes, wire: Wire) -> UnaryCall | None:
        """Takes a unary call; returns it where it may wait."""
        self.calls += 1
        rpc = _RPCS.get(path)
        if rpc is None:
            self._special(path, body, wire)
            return None
        try:
            request = rpc.parse(body)
        except DecodeError:
            wire.fail(Code.INVALID_ARGUMENT, f"{path}: the request is not a message of this rpc", b"")
            return None
        return self._run(rpc, request, wire)

    def _run(self, rpc: Rpc, request: Any, wire: Wire) -> UnaryCall | None:
        now, machine = self._clock(), self.machine
        task_id, incarnation, service_incarnation = rpc.caller(request)
        found = self._admit(rpc, wire, task_id, incarnation, service_incarnation, now)
        if isinstance(found, Status):
            wire.fail(found.code, found.message, status_details(found))
            return None
        task_id = found
        if incarnation == 0 and (task := machine.roster.get(task_id)) is not None:
            incarnation = task.agent  # profiles B and D do not say it
        call = UnaryCall(wire, rpc, Caller(task_id, incarnation, False))
        rpc.run(machine, call, request, call.caller, now)
        return call

    def _admit(
        self, rpc: Rpc, wire: Wire, task_id: int | None, incarnation: int, service_incarnation: int | None, now: float
    ) -> int | Status:
        """Returns the task that a call comes from, or why it is not let in. Whose the task is comes first: a liar is no sign of life."""
        if self._owners is not None:
            named = self.machine.roster.by_agent.get(incarnation) if task_id is None else task_id
            if named is not None:
                refusal = self._owners.may_come(named, wire.key, wire.names()) if rpc.registers else self._owners.may_call(named, wire.key)
                if refusal is not None:
                    return refusal
        if service_incarnation is not None:
            return self.machine.check(task_id, incarnation, service_incarnation, now)
        assert task_id is not None
        return task_id

    def _special(self, path: str, body: bytes, wire: Wire) -> None:
        if path == STATUS:
            wire.succeed(self.status().SerializeToString())
        elif path == STACKS:
            try:
                task_id = session_pb2.StacksRequest.FromString(body).task_id
            except DecodeError:
                wire.fail(Code.INVALID_ARGUMENT, f"{path}: the request is not a message of this rpc", b"")
                return
            self.streams.ask_stacks(StacksCall(wire, task_id), task_id, self._clock())
        else:
            wire.fail(Code.UNIMPLEMENTED, f"{path} is not served here; expected one of profiles A, B and D, or {SESSION}", b"")

    def status(self) -> session_pb2.StatusResponse:
        """Returns what `holdfast status` shows."""
        status = status_of(self.machine, self.calls, self._clock(), self.streams.open_tasks())
        status.journal = "" if self._journal is None else str(self._journal.path)
        return status

    def status_from_thread(self) -> session_pb2.StatusResponse:
        """Returns the status to another thread: what the serving thread last left for it, at most a second old."""
        return self._left_status

    def drop(self, call: UnaryCall) -> None:
        """Forgets a call whose client has gone away."""
        self.machine.drop(call)

    # ---- Streams -------------------------------------------------------------------------------------------------------------------

    def stream_frame(self, stream: Stream, body: bytes) -> None:
        """Takes one frame of a Session."""
        self.calls += 1
        self.streams.frame(stream, body, self._clock(), self.status)

    def stream_closed(self, stream: Stream) -> None:
        """Learns that a Session's stream has ended; its task lives on until its heartbeat timeout."""
        self.streams.closed(stream)

    # ---- Time and replies ----------------------------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """Returns when `tick` should be called at the latest."""
        return min(self.machine.next_due(), self.streams.next_due())

    def tick(self) -> None:
        """Lets time pass."""
        now = self._clock()
        self.machine.tick(now)
        if self._journal is None:
            self.machine.forget_changes()
        self.streams.tick(now)
        if now >= self._leave_status_at:
            self._left_status, self._leave_status_at = self.status(), now + 1.0

    def flush(self) -> None:
        """Writes the journal, then sends all replies that the machine has made."""
        machine = self.machine
        if self._journal is not None:
            self._journal.write(machine)
        while machine.replies:
            replies, machine.replies[:] = machine.replies[:], []
            for reply in replies:
                call: UnaryCall | SessionCall | StacksCall = reply.call
                call.settle(machine, reply)
        self.streams.note_changes(self._clock())

    def over(self, linger_s: float, startup_timeout_s: float) -> str | None:
        """Says why the service should end, None while it should not. A time of 0 is never."""
        now, machine = self._clock(), self.machine
        self._finished = machine.all_shut_down()
        if self._finished:
            return "every process has shut down"
        since = machine.over_since()
        if since is not None and linger_s and now - since > linger_s:
            return f"every process has been gone for {now - since:.0f} s"
        never = all(task.last_seen is None for task in machine.roster.tasks)
        if never and startup_timeout_s and now - machine.started > startup_timeout_s:
            return f"no process came within {startup_timeout_s:.0f} s"
        return None

    def close(self) -> None:
        """Ends all that waits with CANCELLED."""
        self.streams.close_all(Status(Code.CANCELLED, "the coordination service ends"))
        if self._journal is not None:
            self._journal.close(finished=self._finished)

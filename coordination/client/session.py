"""Our Session with the service: one stream, replies matched to requests, changes pushed.

A `_SessionStream` is one life of a connection; `SessionTransport` holds the present one and opens
the next when it breaks. The service knows a task by its incarnation, so a request that is sent
again on the next stream meets the results of the first sending.
"""

from __future__ import annotations

import itertools
import math
import queue
import ssl
import threading
from collections.abc import Callable
from typing import Any

from holdfast.proto import session_pb2 as spb

from ..credentials import Credentials
from ..deadline import Deadline
from ..errors import CoordinationError, Fenced, HoldfastError
from ..limits import Limits
from ..names import REPORT_AGAIN
from ..vitals import stacks
from .answers import make_error, response_of, status_name
from .stream import Stream, hello_of

ANSWER_GRACE_S = 5.0
"""How much longer than a call's own time a client waits for the service to say that the time is
over, and who was missing.
"""

MOST_BYTES = Limits().value_bytes + Limits().key_bytes
"""The largest request that the service takes, in a frame."""

RECONNECTABLE = {
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "UNKNOWN",
}
"""How a stream may end without ending the session: resets, a dying service, or being dropped as a
slow reader.
"""


class TransportError(HoldfastError):
    """Says that the connection failed before an answer came; `sent` is False when the request
    surely never left. Internal.
    """

    sent: bool = True


PASSING = (TransportError, OSError, RuntimeError)
"""Why no stream can be opened now: also that this process may open no file, or thread, more."""


class SessionTransport:
    """Carries calls over a stream that it opens again when it breaks. Safe from several threads.

    `on_broken()` is called when the stream ends and another should be opened by `join`;
    `on_fenced(error)` when the service has ended the session for good; `on_delta(delta, stream)`
    with each change of processes, and the number of its stream. `report()` returns what the process
    has reported, which each further stream begins with: a service that was started again does not
    know it.
    """

    def __init__(
        self,
        address: str,
        identity: spb.Open,
        credentials: Credentials,
        *,
        on_delta: Callable[[spb.Delta, int], None],
        on_broken: Callable[[], None],
        on_fenced: Callable[[CoordinationError], None],
        report: Callable[[], spb.ReportRequest] = spb.ReportRequest,
    ) -> None:
        self._address = address
        self._identity = identity
        self._numbers = itertools.count(1)
        self._on_delta = on_delta
        self._on_broken = on_broken
        self._on_fenced = on_fenced
        self._report = report
        # Read once: the files may be gone when a stream is opened again.
        self._hello = hello_of(credentials.metadata())
        self._tls = credentials.tls_context()
        self._lock = threading.Lock()
        self._stream: _SessionStream | None = None
        self._older: _SessionStream | None = None  # while the next one is being opened
        self._opening: _SessionStream | None = None
        self._service = 0
        self._closed = False
        self.heartbeat_timeout_s: float | None = None  # until the service says it
        self.num_processes = 1
        self.service_address = address  # behind a relay: what the relay forwards to

    def join(self, deadline: Deadline) -> None:
        """Opens a stream. Raises one of PASSING where another attempt may succeed."""
        with self._lock:
            if self._closed:
                raise TransportError("the client is closed", sent=False)
            self._older = self._stream or self._older
            self._stream = None
        # One that was given up may be on its way for longer than the next.
        identity = spb.Open(number=next(self._numbers))
        identity.MergeFrom(self._identity)
        stream = _SessionStream(self._address, self._hello, self._tls, self)
        self._opening = stream
        try:
            self._accept(stream.open(identity, deadline))
            report = self._report()
            if report.ListFields():
                stream.tell(REPORT_AGAIN, report, deadline)
        except BaseException:
            stream.connection.end()
            raise
        # `close` may have come while the stream was being opened: it saw no stream to end.
        with self._lock:
            self._stream = stream
            older = self._older
            self._older = None
            closed = self._closed
        # Not before the service has taken the new one: an end that it heard of in a cut of the
        # network, with no other stream to be seen, would be a death.
        if older is not None:
            older.connection.end()
        if closed:
            stream.connection.end()
        # A stream that ended before it was the present one has told nobody: `ended` ignores others.
        if stream.is_over:
            raise TransportError("the session was lost as it was opened")

    @property
    def joined(self) -> bool:
        """Whether a service has let this client in before."""
        return self._service != 0

    def _accept(self, opened: spb.Opened) -> None:
        if self._service not in (0, opened.service_incarnation):
            raise Fenced(
                f"the coordinator at {self.service_address} was restarted without its journal: its"
                " keys and barriers are gone; restart the job"
            )
        self._service = opened.service_incarnation
        # The budget of an outage is the coordinator's: both sides give up at the same time.
        self.heartbeat_timeout_s = opened.heartbeat_timeout_ms / 1000
        self.num_processes = opened.num_processes

    def call(
        self,
        method: str,
        request: Any,
        deadline: Deadline,
        grace_s: float = 0.0,
        **told: Any,
    ) -> Any:
        """Sends one call, with what else is `told` in its Request, and returns its response. Raises
        TransportError, or the exception for the service's answer.
        """
        stream = self._stream
        if stream is None:
            raise TransportError("the session is being opened again", sent=False)
        # 0 means for ever, and a call that is sent again may have no time left.
        timeout_ms = max(1, int((deadline.remaining_s() - grace_s) * 1000))
        call = spb.Request(
            id=stream.next_id(),
            method=method,
            body=request.SerializeToString(),
            timeout_ms=timeout_ms,
            **told,
        )
        reply = stream.ask(call, deadline)
        if reply.code:
            raise make_error(status_name(reply.code), reply.message, dict(reply.payloads), request)
        return response_of(method).FromString(reply.body)

    def tell_service_address(self, address: str) -> None:
        """Takes a relay's word of where the service is."""
        self.service_address = address

    def take(self, stream: _SessionStream, frame: spb.ServerFrame) -> None:
        """Takes a frame that is no reply. Called by the stream's own thread."""
        kind = frame.WhichOneof("frame")
        if kind == "delta":
            self._on_delta(frame.delta, stream.number)
        elif kind == "ask" and frame.ask.what == "stacks":
            answer = spb.Answer(id=frame.ask.id, body=stacks().encode())
            stream.send(spb.ClientFrame(answer=answer), math.inf)

    def ended(self, stream: _SessionStream, code: str, details: str) -> None:
        """Takes the end of a stream. Called by the thread that reads."""
        # An older stream may end late, when the next one is open already: that is no news.
        with self._lock:
            if self._closed or stream is not self._stream:
                return
            self._stream = None
        if code in RECONNECTABLE or code == "OK":
            # At once: a listener on the stream's own thread may wait for the next stream.
            self._on_broken()
        else:
            # Not on this thread: it reads for all callers, and whoever is notified may block.
            stream.connection.later(lambda: self._on_fenced(_final_error(code, details)))

    def abandon(self) -> None:
        """Lets go of the streams in a forked child, which sends nothing."""
        for stream in self._streams():
            stream.connection.abandon()

    def _streams(self) -> list[_SessionStream]:
        found = (self._stream, self._older, self._opening)
        return [stream for stream in found if stream is not None]

    def close(self) -> None:
        """Ends the stream; calls in flight raise TransportError."""
        with self._lock:
            self._closed = True
            streams = self._streams()
            self._stream = None
            self._older = None
        for stream in streams:
            stream.connection.end()


class _SessionStream:
    """One life of the connection: frames out and in, and the waiting calls."""

    def __init__(
        self, address: str, hello: bytes, context: ssl.SSLContext | None, owner: SessionTransport
    ) -> None:
        self._owner = owner
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[spb.Reply | None]] = {}
        self._opened: queue.SimpleQueue[spb.Opened | None] = queue.SimpleQueue()
        self.number = 0  # of its Open
        self.is_over = False
        self._status: tuple[str, str] = ("UNAVAILABLE", "")
        self.connection = Stream(address, hello, context, self._take, self._ended)

    def open(self, opening: spb.Open, deadline: Deadline) -> spb.Opened:
        """Sends the client's first frame and waits for the service's."""
        self.number = opening.number
        self.connection.start(spb.ClientFrame(open=opening).SerializeToString(), deadline)
        try:
            opened = self._opened.get(timeout=deadline.remaining_s())
        except queue.Empty:
            raise TransportError("no answer to the opening of a session") from None
        if opened is not None:
            return opened
        code, details = self._status
        # Of a service that was joined the port may be another's for a while.
        if code in RECONNECTABLE or (code == "UNIMPLEMENTED" and self._owner.joined):
            raise TransportError(details)
        raise _final_error(code, details)

    def send(self, frame: spb.ClientFrame, until: float) -> bool:
        """Sends a frame; returns False where nothing of it was sent by `until`."""
        return self.connection.send(frame.SerializeToString(), until)

    def next_id(self) -> int:
        """Returns the id of the stream's next request."""
        return next(self._ids)

    def tell(self, method: str, request: Any, deadline: Deadline) -> None:
        """Sends a request whose reply nobody waits for."""
        call = spb.Request(id=self.next_id(), method=method, body=request.SerializeToString())
        self.send(spb.ClientFrame(request=call), deadline.at)

    def ask(self, call: spb.Request, deadline: Deadline) -> spb.Reply:
        """Sends a request and waits for its reply."""
        # Here, since the service would end the whole Session over one large request.
        if len(call.body) > MOST_BYTES:
            what = (
                f"{call.method}: a request of {len(call.body)} bytes; expected at most"
                f" {MOST_BYTES}: split the value, or put it into a file"
            )
            raise CoordinationError(what, code="RESOURCE_EXHAUSTED")
        number = call.id
        inbox: queue.SimpleQueue[spb.Reply | None] = queue.SimpleQueue()
        with self._lock:
            if self.is_over:
                raise TransportError("the session was lost", sent=False)
            self._waiting[number] = inbox
        try:
            if not self.send(spb.ClientFrame(request=call), deadline.at):
                raise _unanswered(call.method, deadline)
            reply = self._answer(inbox, call, deadline)
        finally:
            self._waiting.pop(number, None)
        # A stream that ended after the time was over is no outage: the caller would try again.
        if reply is None and deadline.passed():
            raise _unanswered(call.method, deadline)
        if reply is None:
            raise TransportError("the session was lost before the answer came")
        return reply

    def _answer(
        self, inbox: queue.SimpleQueue[spb.Reply | None], call: spb.Request, deadline: Deadline
    ) -> spb.Reply | None:
        try:
            return inbox.get(timeout=deadline.remaining_s())
        except BaseException as error:
            # The service must not go on to wait, and answer into the void.
            self.send(spb.ClientFrame(cancel=spb.Cancel(id=call.id)), deadline.at)
            if isinstance(error, queue.Empty):
                raise _unanswered(call.method, deadline) from None
            raise

    def _ended(self, code: str, details: str) -> None:
        self._status = (code, details)
        with self._lock:
            self.is_over = True
            waiting = list(self._waiting.values())
        for inbox in waiting:
            inbox.put(None)
        self._opened.put(None)
        self._owner.ended(self, code, details)

    def _take(self, data: bytes) -> None:
        frame = spb.ServerFrame.FromString(data)
        if frame.HasField("reply"):
            reply = frame.reply
            if (inbox := self._waiting.get(reply.id)) is not None:
                inbox.put(reply)
        elif frame.opened.coordinator:
            self._owner.tell_service_address(frame.opened.coordinator)
        elif frame.HasField("opened"):
            self._opened.put(frame.opened)
        elif frame.HasField("end"):
            self.connection.end(status_name(frame.end.code), frame.end.message)
        else:
            self.connection.later(lambda: self._owner.take(self, frame))


def _unanswered(method: str, deadline: Deadline) -> CoordinationError:
    return CoordinationError(
        f"{method}: no answer within {deadline.timeout_s:g} s", code="DEADLINE_EXCEEDED"
    )


def _final_error(code: str, details: str) -> CoordinationError:
    if code in {"ABORTED", "FAILED_PRECONDITION", "PERMISSION_DENIED"}:
        return Fenced(details, code=code)
    return CoordinationError(details, code=code)

"""The service over gRPC's completion queue, on one thread: what gRPC's own Python server is built
on, without its thread pool.

`grpc._cython.cygrpc` is private. Outside the releases that were tested (grpc_release.py)
transport_aio serves instead. What it costs and saves is in benchmarks/RESULTS-coordination.md.
Each operation that is started ends as one event of the queue, whose tag is a function to call with
the event. A unary call is three events: it comes, its request is read, its response is sent. For a
call that waits long a fourth reports that its client goes away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from grpc._cython import cygrpc

from ..core.machine import STANDSTILL_S
from ..core.status import Code
from ..names import SESSION, STATUS_DETAILS
from .admission import CallRefused
from .outbox import LARGE_BYTES, Outbox, Turns
from .service import Service, UnaryCall
from .sessions import Session
from .transports import ALTERNATIVE_NAMES, Listening, channel_options

log = logging.getLogger("holdfast.coordination")

_ACCEPTED_AHEAD = 64  # calls that may come before the next poll of the queue
_BATCH = 256  # events that share one transaction of the journal
_STOP_POLL_S = 0.1  # between two polls of whether the service should stop
_CATCH_UP_S = 2.0  # at most, after a standstill
_QUIET_S = 0.1  # without an event: then all has been read
_RECEIVE_MESSAGE = cygrpc.ReceiveMessageOperation
_SEND_MESSAGE = cygrpc.SendMessageOperation
_RECEIVE_CLOSE = cygrpc.ReceiveCloseOnServerOperation
_NO_DEADLINE = 1e17  # seconds since 1970; what gRPC says for none is above
_TIMED_OUT = cygrpc.CompletionType.queue_timeout
_OK = cygrpc.StatusCode.ok
_SEND_INITIAL = cygrpc.SendInitialMetadataOperation(None, 0)
_SEND_OK = cygrpc.SendStatusFromServerOperation(None, _OK, b"", 0)
_NO_COMPRESSION = 0


def _ignore(event: Any) -> None:
    pass


def _names(call: Any) -> Sequence[bytes]:
    names: Sequence[bytes] = (cygrpc.auth_context(call) or {}).get(ALTERNATIVE_NAMES.encode(), ())
    return names


class _UnaryWriter:
    """A ResponseWriter of one unary call."""

    __slots__ = ("_body", "_call", "_held", "_transport", "done", "key", "path", "timed")

    def __init__(
        self, transport: CompletionQueueTransport, call: Any, path: str, key: str, timed: bool
    ) -> None:
        self._transport = transport
        self._call = call
        self.path = path
        self.key = key
        self.timed = timed
        self._held: UnaryCall | None = None
        self._body = b""  # of a response that waits for its turn
        self.done = False
        call.start_server_batch((_RECEIVE_MESSAGE(0),), self._on_request)

    def names(self) -> Sequence[bytes]:
        """Returns the alternative names in the caller's certificate."""
        return _names(self._call)

    def _on_request(self, event: Any) -> None:
        body = event.batch_operations[0].message()
        if body is None:
            self.done = True
            return
        self._held = self._transport.service.unary(self.path, body, self)
        if self._held is not None and self._held.watched:
            self._transport.unanswered.append(self)

    def watch(self) -> None:
        """Has the queue report when the client goes away, unless the call has been answered."""
        if not self.done:
            self._call.start_server_batch((_RECEIVE_CLOSE(0),), self._on_close)

    def _on_close(self, event: Any) -> None:
        if not self.done and self._held is not None:
            self.done = True
            self._transport.service.drop(self._held)

    def succeed(self, body: bytes) -> None:
        if self.done:
            return
        self.done = True
        self._body = body
        if len(body) < LARGE_BYTES or self._transport.turns.take(self, len(body)):
            self.begin()

    def begin(self) -> bool:
        """Sends the response."""
        message = _SEND_MESSAGE(self._body, _NO_COMPRESSION)
        self._body = b""
        self._call.start_server_batch((_SEND_INITIAL, message, _SEND_OK), self._on_sent)
        return True

    def _on_sent(self, event: Any) -> None:
        self._transport.turns.give_back(self)

    def fail(self, code: int, message: str, details: bytes) -> None:
        if not self.done:
            self.done = True
            trailing = ((STATUS_DETAILS, details),) if details else None
            status = cygrpc.SendStatusFromServerOperation(trailing, int(code), message.encode(), 0)
            self._call.start_server_batch((_SEND_INITIAL, status), _ignore)


class _QueuedStream:
    """A SessionStream. gRPC takes one write at a time: the others wait in an outbox."""

    __slots__ = ("_call", "_ended", "_outbox", "_transport", "_written", "key", "session")

    def __init__(self, transport: CompletionQueueTransport, call: Any, key: str) -> None:
        self._transport = transport
        self._call = call
        self.key = key
        self.session: Session | None = None
        self._outbox = Outbox(transport.turns, self._start, self._finish)
        # One call of a function less for each message.
        self._written = self._outbox.written
        self._ended = False
        call.start_server_batch((_SEND_INITIAL,), self._written)
        call.start_server_batch((_RECEIVE_CLOSE(0),), self._on_close)
        self._read()

    def bind(self, session: Session | None) -> None:
        self.session = session

    def names(self) -> Sequence[bytes]:
        """Returns the alternative names in the caller's certificate."""
        return _names(self._call)

    @property
    def backlog_bytes(self) -> int:
        """The bytes that the client leaves unread."""
        return self._outbox.backlog_bytes

    def _read(self) -> None:
        self._call.start_server_batch((_RECEIVE_MESSAGE(0),), self._on_frame)

    def _on_frame(self, event: Any) -> None:
        frame = event.batch_operations[0].message()
        if frame is None or self._ended:  # the client has sent all
            self.finish(Code.OK, "")
            return
        self._read()
        self._transport.service.stream_frame(self, frame)

    def _on_close(self, event: Any) -> None:
        self._end()
        self._transport.service.stream_closed(self)

    def _end(self) -> None:
        self._ended = True
        self._outbox.close()

    def write(self, frame: bytes, shared: bytes = b"") -> None:
        self._outbox.write(frame, shared)

    def _start(self, message: bytes) -> None:
        self._call.start_server_batch((_SEND_MESSAGE(message, _NO_COMPRESSION),), self._written)

    def finish(self, code: int, message: str) -> None:
        if self._ended:
            return
        if self._outbox.writing and code == Code.RESOURCE_EXHAUSTED:
            # A client that does not read never comes to the end of what waits for it.
            self._end()
            self._call.cancel(int(code), message)
        else:
            self._outbox.finish(int(code), message)

    def _finish(self, code: int, message: str) -> None:
        self._end()
        status = cygrpc.SendStatusFromServerOperation(None, code, message.encode(), 0)
        self._call.start_server_batch((status,), _ignore)


class CompletionQueueTransport:
    """Serves a Service on the calling thread until it is over."""

    def __init__(self, service: Service, listening: Listening) -> None:
        self.service = service
        self._listening = listening
        self.unanswered: list[_UnaryWriter] = []
        self.turns = Turns(service.config.limits.under_way_bytes, listening.clock)
        self._admission = listening.admission(service.config.limits)
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(tuple(channel_options(service.config)), False)
        self._server.register_completion_queue(self._queue)

    def bind(self) -> int:
        """Binds the port; OSError where it is taken."""
        server = self._server
        address = self._listening.address.encode()

        def add_port(tls: Any) -> int:
            if tls is None:
                return int(server.add_http2_port(address))
            return int(server.add_http2_port(address, tls._credentials))

        port = self._listening.bind(add_port)
        server.start()
        for _ in range(_ACCEPTED_AHEAD):
            self._accept_next()
        return port

    def _accept_next(self) -> None:
        self._server.request_call(self._queue, self._queue, self._on_call)

    def _on_call(self, event: Any) -> None:
        call = event.call
        if call is None or not event.success:
            return
        self._accept_next()
        path = event.call_details.method.decode("latin-1")
        try:
            key = self._admission.admit(
                call.peer, event.invocation_metadata, self._listening.clock()
            )
        except CallRefused as refused:
            why = str(refused).encode()
            status = cygrpc.SendStatusFromServerOperation(None, int(refused.code), why, 0)
            call.start_server_batch((_SEND_INITIAL, status), _ignore)
            return
        if path == SESSION:
            _QueuedStream(self, call, key)
        else:
            _UnaryWriter(self, call, path, key, event.call_details.deadline < _NO_DEADLINE)

    def serve(self, stop_reason: Callable[[], str | None]) -> str:
        """Serves until `stop_reason()` gives one, which it returns."""
        service = self.service
        clock = self._listening.clock
        poll = self._queue.poll
        next_stop_poll = 0.0
        batch = _BATCH if service.journaled else 1
        while True:
            now = clock()
            if now >= next_stop_poll:
                if (reason := stop_reason()) is not None:
                    break
                next_stop_poll = now + _STOP_POLL_S
                self.turns.tick()
            due = service.next_due()
            # What has arrived is read before time passes: a heartbeat may be in it.
            event = poll(time.time() + min(due, next_stop_poll) - now)
            remaining = batch
            while event.completion_type != _TIMED_OUT:
                self._handle(event)
                remaining -= 1
                if not remaining:
                    break
                event = poll(0)
            self._flush()
            if (late_s := clock() - due) >= 0:
                # A process that was stopped within poll finds its time over, and the heartbeats
                # of the whole standstill unread.
                if late_s > STANDSTILL_S:
                    self._catch_up()
                service.tick()
                self._flush()
        self._stop()
        return reason

    def _catch_up(self) -> None:
        """Reads what has arrived while this process stood still."""
        deadline = time.time() + _CATCH_UP_S
        while (now := time.time()) < deadline:
            event = self._queue.poll(now + _QUIET_S)
            if event.completion_type == _TIMED_OUT:
                return
            self._handle(event)
            self._flush()

    @staticmethod
    def _handle(event: Any) -> None:
        """Handles one event. A defect of ours met by one request is logged, and leaves the others
        alone.
        """
        try:
            event.tag(event)
        except Exception:
            log.exception("an event of the queue was not handled")

    def _flush(self) -> None:
        self.service.flush()
        if self.unanswered:
            for unary in self.unanswered:
                unary.watch()
            self.unanswered.clear()

    def _stop(self) -> None:
        """Ends the waiting calls, lets the last responses go out, and closes the port."""
        self.service.close()
        self._flush()
        stopped: list[Any] = []
        self._server.shutdown(self._queue, stopped.append)
        deadline = time.time() + 1.0
        while not stopped and time.time() < deadline:
            event = self._queue.poll(time.time() + 0.05)
            if event.completion_type != _TIMED_OUT and event.tag == stopped.append:
                event.tag(event)
        self._server.cancel_all_calls()

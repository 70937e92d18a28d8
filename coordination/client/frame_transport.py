"""The stream of a Session: frames of bytes, over gRPC's completion queue or its public API.

`grpc._cython.cygrpc` is private, but it is what grpc's own calls are made of. On it, a sender
starts the sending itself, and a caller that waits for an answer reads: no thread stands between the
connection and the caller. The public API puts three there (benchmarks/RESULTS-coordination.md has
the difference).
"""

from __future__ import annotations

import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
from grpc._cython import cygrpc

from holdfast.proto import session_pb2

from ..grpc_release import is_tested_grpc
from ..names import SESSION
from .answers import status_name

IDLE_S = 0.02
"""A stream's own thread reads after no caller has read for so long."""

NUDGE = session_pb2.ClientFrame(cancel=session_pb2.Cancel(id=0)).SerializeToString()
"""A frame of no meaning; that it is sent is an event, and frees the thread that waits for one."""
NUDGE_S = 0.2
"""Sending takes so long at most, or the stream is ended."""

OnFrame = Callable[[bytes], None]
OnEnd = Callable[[str, str], None]
Metadata = tuple[tuple[str, str], ...]
Inbox = queue.SimpleQueue[Any]


class FrameTransport(Protocol):
    """One bidirectional stream of frames. Safe from several threads.

    `on_frame` and `on_end` are called by one thread at a time, from `start` on, `on_end` once and
    last. They must not block: what may block goes to `later`.
    """

    def start(self) -> None:
        """Starts to read. Once, before all else."""

    def send(self, frame: bytes) -> None:
        """Sends a frame, without waiting."""

    def ask(self, frame: bytes, inbox: Inbox, timeout_s: float) -> Any:
        """Sends a frame and returns what `on_frame` or `on_end` puts into `inbox`; raises
        queue.Empty after `timeout_s`.
        """

    def later(self, call: Callable[[], None]) -> None:
        """Has the stream's own thread make a call, after all earlier ones."""

    def cancel(self) -> None:
        """Ends the stream; `on_end` follows."""


def open_frame_transport(
    channel: grpc.Channel, metadata: Metadata, on_frame: OnFrame, on_end: OnEnd
) -> FrameTransport:
    """Opens a Session's stream on a channel, which is closed when the stream ends."""
    transport = QueueFrameTransport if is_tested_grpc() else PublicFrameTransport
    return transport(channel, metadata, on_frame, on_end)


_READ = object()
"""Put into the inbox of a waiting caller: the turn at reading is now its own."""


class QueueFrameTransport:
    """A stream on a completion queue of its own.

    Senders start their operation themselves; gRPC takes one at a time, the rest queue. Readers take
    turns: one waiting caller reads for all until its own answer has come, then another waiting
    caller goes on. When nobody waits the stream's own thread reads. gRPC's queue has no time-out
    here, so the own thread frees a caller whose time is over by sending a frame. Where nothing can
    be sent it ends the stream.
    """

    def __init__(
        self, channel: grpc.Channel, metadata: Metadata, on_frame: OnFrame, on_end: OnEnd
    ) -> None:
        self._channel = channel
        self._on_frame = on_frame
        self._on_end = on_end
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._sending = True  # until the initial metadata is out
        self._over = False
        self._reading = False
        self._receiving = False
        self._turns = 0  # of callers at reading
        self._until = math.inf  # when the time of the caller that reads is over
        self._nudged = -1  # the turn whose caller was freed by a frame
        self._waiting: dict[Inbox, float] = {}  # callers that do not read: when their time is over
        self._own: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asleep = False  # the own thread, until the caller that reads is overdue
        begin = (cygrpc.SendInitialMetadataOperation(metadata, 0),)
        status = (cygrpc.ReceiveStatusOnClientOperation(0),)
        initial = (cygrpc.ReceiveInitialMetadataOperation(0),)
        operations = ((begin, self._sent), (status, self._ended), (initial, _ignore))
        # (flags, method, host, deadline, metadata, credentials, operations, context): cygrpc's
        # function takes them by position.
        arguments = (0, SESSION.encode(), None, None, metadata, None, operations, None)
        self._call = channel._channel.segregated_call(*arguments)

    def start(self) -> None:
        threading.Thread(target=self._keep, name="holdfast-session", daemon=True).start()

    # --- Callers

    def send(self, frame: bytes) -> None:
        try:
            with self._lock:
                if self._over:
                    return
                if self._sending:
                    self._outbox.append(frame)
                    return
                self._sending = True
                self._call.operate((cygrpc.SendMessageOperation(frame, 0),), self._sent)
        except BaseException as error:
            self._abandon(error)
            raise

    def ask(self, frame: bytes, inbox: Inbox, timeout_s: float) -> Any:
        try:
            return self._ask(frame, inbox, time.monotonic() + timeout_s)
        except queue.Empty:
            raise
        except BaseException as error:
            self._abandon(error)
            raise

    def _ask(self, frame: bytes, inbox: Inbox, until: float) -> Any:
        with self._lock:
            reads = not self._reading and not self._over
            if reads:
                self._begin_turn(until)
            else:
                self._waiting[inbox] = until
        if reads:
            return self._read_for(inbox, until, frame)
        return self._wait_for(inbox, frame, until)

    def _wait_for(self, inbox: Inbox, frame: bytes, until: float) -> Any:
        """Sends a frame and waits for an answer that another thread reads, or for the turn to
        read.
        """
        answer = None
        try:
            self.send(frame)
            answer = inbox.get(timeout=max(0.0, until - time.monotonic()))
        finally:
            if answer is not _READ:
                # A reader that ended may have chosen this caller just as its answer, or the end
                # of its time, came: then the turn is passed on, or nobody would read any more.
                with self._lock:
                    chosen = self._waiting.pop(inbox, None) is None
                if chosen:
                    self._pass_on()
        return self._read_for(inbox, until) if answer is _READ else answer

    def _read_for(self, inbox: Inbox, until: float, frame: bytes | None = None) -> Any:
        """Sends a frame, if any, and reads until an inbox has its answer, or the time is over."""
        try:
            if frame is not None:
                self.send(frame)
            while inbox.empty():
                if time.monotonic() > until:
                    raise queue.Empty
                self._handle_next()
        finally:
            self._pass_on()
        return inbox.get_nowait()

    def _begin_turn(self, until: float) -> None:
        self._reading = True
        self._until = until
        self._turns += 1

    def _pass_on(self) -> None:
        """Ends a turn at reading: the next is of a waiting caller, if any."""
        with self._lock:
            if self._waiting:
                inbox = next(iter(self._waiting))
                self._begin_turn(self._waiting.pop(inbox))
                inbox.put(_READ)
                return
            self._reading = False
            asleep = self._asleep
            self._asleep = False
        if asleep:
            self._own.put(_nothing)

    def later(self, call: Callable[[], None]) -> None:
        self._own.put(call)

    def cancel(self) -> None:
        try:
            self._call.cancel(cygrpc.StatusCode.cancelled, "the client ends")
        except BaseException as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """Ends the stream: the handler of a signal raised in a call of the main thread.

        What was left half done, such as a turn, is over with the stream. gRPC lets go of a call
        whose reading was interrupted: no event of it ever comes again.
        """
        _release_condition(error)
        self._finish("CANCELLED", "a call was interrupted")
        # Another thread may be reading, and is freed by the status.
        self._call.cancel(cygrpc.StatusCode.cancelled, "a call was interrupted")

    # --- The stream's own thread

    def _keep(self) -> None:
        """Reads while no caller does, makes the calls left for later, and frees a caller that is
        overdue.
        """
        seen = -1
        while True:
            with self._lock:
                self._asleep = self._reading and self._turns == seen
                nap_s = max(IDLE_S, self._until - time.monotonic()) if self._asleep else IDLE_S
                seen = self._turns
            try:
                call = self._own.get(timeout=min(nap_s, threading.TIMEOUT_MAX))
                if call is None:
                    self._channel.close()
                    return
                call()
            except queue.Empty:
                self._take_turn(seen)

    def _take_turn(self, seen: int) -> None:
        with self._lock:
            idle = not self._reading and not self._over and self._turns == seen
            turn = self._turns
            overdue_s = time.monotonic() - self._until if self._reading else 0.0
            if idle:
                self._reading = True
                self._until = math.inf
        if overdue_s > 0 and self._nudged != turn:
            self._nudged = turn
            self.send(NUDGE)
        elif overdue_s > NUDGE_S:
            self.cancel()
        if idle:
            # What was left for later is made without the turn: a listener may wait for what another
            # thread calls for.
            while not self._waiting and not self._over and self._own.empty():
                self._handle_next()
            self._pass_on()

    # --- Events, handled by the reader

    def _handle_next(self) -> None:
        try:
            if not self._receiving:
                self._receiving = True
                self._call.operate((cygrpc.ReceiveMessageOperation(0),), self._received)
            event = self._call.next_event()
            event.tag(event)
        except BaseException as error:
            self._abandon(error)
            raise

    def _sent(self, event: Any) -> None:
        with self._lock:
            if self._outbox and not self._over and event.success:
                operation = cygrpc.SendMessageOperation(self._outbox.popleft(), 0)
                self._call.operate((operation,), self._sent)
            else:
                self._sending = False

    def _received(self, event: Any) -> None:
        frame = event.batch_operations[0].message()
        if frame is not None:  # None is the end; the status follows
            self._receiving = False
            self._on_frame(frame)

    def _ended(self, event: Any) -> None:
        status = event.batch_operations[0]
        details = status.details() or ""
        if isinstance(details, bytes):
            details = details.decode(errors="replace")
        self._finish(status_name(status.code()), details)

    def _finish(self, code: str, details: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self._on_end(code, details)
        self._own.put(None)


def _release_condition(error: BaseException) -> None:
    """Releases the lock of gRPC's channel, if that is where an error was raised.

    The compiled code of gRPC enters and leaves it as a `with` does, through methods in Python. A
    signal that is handled in those leaves the lock held, and each later use of the channel waits
    for it, with no time limit.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        condition = frame.f_locals.get("self")
        if not isinstance(condition, threading.Condition):
            continue
        if condition._is_owned():  # type: ignore[attr-defined]
            condition.release()


def _ignore(event: Any) -> None:
    pass


def _nothing() -> None:
    pass


class PublicFrameTransport:
    """A stream over gRPC's public API, read by a thread of its own.

    What is left for later is made by another: a listener may call the client, and wait for what the
    first one reads.
    """

    def __init__(
        self, channel: grpc.Channel, metadata: Metadata, on_frame: OnFrame, on_end: OnEnd
    ) -> None:
        self._channel = channel
        self._on_frame = on_frame
        self._on_end = on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._own: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(SESSION)(self._frames(), metadata=metadata)

    def start(self) -> None:
        threading.Thread(target=self._read, name="holdfast-reader", daemon=True).start()
        threading.Thread(target=self._keep, name="holdfast-session", daemon=True).start()

    def _frames(self) -> Iterator[bytes]:
        while (frame := self._outbox.get()) is not None:
            yield frame

    def send(self, frame: bytes) -> None:
        self._outbox.put(frame)

    def ask(self, frame: bytes, inbox: Inbox, timeout_s: float) -> Any:
        self._outbox.put(frame)
        return inbox.get(timeout=timeout_s)

    def later(self, call: Callable[[], None]) -> None:
        self._own.put(call)

    def cancel(self) -> None:
        self._outbox.put(None)
        self._call.cancel()

    def _read(self) -> None:
        code = "OK"
        details = ""
        try:
            for frame in self._call:
                self._on_frame(frame)
        except grpc.RpcError as error:
            code = error.code().name
            details = error.details() or ""
        self._outbox.put(None)
        self._on_end(code, details)
        self._own.put(None)

    def _keep(self) -> None:
        """Makes the calls left for later, until the stream is over."""
        while (call := self._own.get()) is not None:
            call()
        self._channel.close()

"""The stream under a session: frames of bytes out and in, over gRPC's completion queue, or its public face where that is untested.

`grpc._cython.cygrpc` is private, but it is what grpc's own calls are made of. On it, whoever sends starts the sending itself and one
thread reads; the public face puts two more threads in between (benchmarks/RESULTS-coordination.md has the difference).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
from grpc._cython import cygrpc

from ._calls import SESSION, status_name

TESTED = ((1, 66), (1, 90))
"""Releases of grpcio, from the first to before the second, whose private module was tested."""

OnFrame = Callable[[bytes], None]
OnEnd = Callable[[str, str], None]
Metadata = tuple[tuple[str, str], ...]


class FrameStream(Protocol):
    """One bidirectional stream of frames. `on_frame` and `on_end` are called from one thread of its own; `on_end` once, last."""

    def send(self, frame: bytes) -> None: ...
    def cancel(self) -> None: ...


def open_stream(channel: grpc.Channel, metadata: Metadata, on_frame: OnFrame, on_end: OnEnd) -> FrameStream:
    """Opens a Session's stream on a channel, which is closed when the stream ends."""
    version = tuple(int(part) for part in grpc.__version__.split(".")[:2])
    kind = QueueStream if TESTED[0] <= version < TESTED[1] else PublicStream
    return kind(channel, metadata, on_frame, on_end)


class QueueStream:
    """A stream on a completion queue of its own. Senders start their operation themselves; gRPC takes one at a time, the rest queue."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata, on_frame: OnFrame, on_end: OnEnd) -> None:
        self._channel, self._on_frame, self._on_end = channel, on_frame, on_end
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._sending = True  # until the initial metadata is out
        self._over = False
        begin = (cygrpc.SendInitialMetadataOperation(metadata, 0),)
        status, initial = (cygrpc.ReceiveStatusOnClientOperation(0),), (cygrpc.ReceiveInitialMetadataOperation(0),)
        operations = ((begin, self._sent), (status, self._ended), (initial, self._ignore))
        self._call = channel._channel.segregated_call(0, SESSION.encode(), None, None, metadata, None, operations, None)
        self._receive()
        threading.Thread(target=self._read, name="holdfast-session", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Sends a frame, without waiting."""
        with self._lock:
            if self._over:
                return
            if self._sending:
                self._outbox.append(frame)
                return
            self._sending = True
            self._call.operate((cygrpc.SendMessageOperation(frame, 0),), self._sent)

    def cancel(self) -> None:
        """Ends the stream; `on_end` follows."""
        self._call.cancel(cygrpc.StatusCode.cancelled, "the client ends")

    def _receive(self) -> None:
        self._call.operate((cygrpc.ReceiveMessageOperation(0),), self._received)

    def _read(self) -> None:
        """Handles events, each by its tag, until the status has come."""
        ended = False
        while not ended:
            event = self._call.next_event()
            ended = event.tag(event)
        self._channel.close()

    def _sent(self, event: Any) -> bool:
        with self._lock:
            if self._outbox and not self._over and event.success:
                self._call.operate((cygrpc.SendMessageOperation(self._outbox.popleft(), 0),), self._sent)
            else:
                self._sending = False
        return False

    def _received(self, event: Any) -> bool:
        frame = event.batch_operations[0].message()
        if frame is not None:
            self._receive()
            self._on_frame(frame)
        return False

    def _ended(self, event: Any) -> bool:
        with self._lock:
            self._over = True
        status = event.batch_operations[0]
        details = status.details()
        self._on_end(status_name(status.code()), details.decode(errors="replace") if isinstance(details, bytes) else details or "")
        return True

    @staticmethod
    def _ignore(event: Any) -> bool:
        return False


class PublicStream:
    """A stream over grpc's public face."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata, on_frame: OnFrame, on_end: OnEnd) -> None:
        self._channel, self._on_frame, self._on_end = channel, on_frame, on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(SESSION)(self._frames(), metadata=metadata)
        threading.Thread(target=self._read, name="holdfast-session", daemon=True).start()

    def _frames(self) -> Iterator[bytes]:
        while (frame := self._outbox.get()) is not None:
            yield frame

    def send(self, frame: bytes) -> None:
        """Sends a frame, without waiting."""
        self._outbox.put(frame)

    def cancel(self) -> None:
        """Ends the stream; `on_end` follows."""
        self._outbox.put(None)
        self._call.cancel()

    def _read(self) -> None:
        code, details = "OK", ""
        try:
            for frame in self._call:
                self._on_frame(frame)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details() or ""
        self._outbox.put(None)
        self._on_end(code, details)
        self._channel.close()

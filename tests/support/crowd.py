"""A service with thousands of Sessions, on no sockets: the machine and its Sessions are real; the
wire counts bytes, and brings a message when it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.limits import Config
from holdfast.coordination.server.service import Service
from holdfast.coordination.server.sessions import Session
from holdfast.proto import coordination_pb2, session_pb2

PROCESSES_PER_HOST = 8


class Wire:
    """The messages on their way to all clients; each takes as long as nobody calls `deliver`.
    Clients keep their last message of at most `kept_bytes`.
    """

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        self.on_way: list[tuple[CrowdStream, bytes, bytes]] = []
        self._shared: set[int] = set()
        self._held_bytes = 0
        self.peak_bytes = 0
        self.sent_bytes = 0
        self.messages = 0

    def put(self, stream: CrowdStream, frame: bytes, shared: bytes) -> None:
        self.on_way.append((stream, frame, shared))
        # Of what several messages share there is one copy.
        self._held_bytes += len(frame)
        if id(shared) not in self._shared:
            self._shared.add(id(shared))
            self._held_bytes += len(shared)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self.sent_bytes += len(frame) + len(shared)
        self.messages += 1

    def deliver(self) -> None:
        """Lets clients read all, until nothing is on its way."""
        while self.on_way:
            read = self.on_way
            self.on_way = []
            self._shared.clear()
            self._held_bytes = 0
            for stream, frame, shared in read:
                stream.take(frame + shared)

    def take_counts(self) -> tuple[int, int]:
        """Returns the bytes and messages since the last call."""
        counts = (self.sent_bytes, self.messages)
        self.sent_bytes = 0
        self.messages = 0
        self.peak_bytes = 0
        return counts


class CrowdStream:
    """A SessionStream whose messages go over the wire; `last` is the last one that was read.
    `listener` gets each.
    """

    __slots__ = ("_wire", "end", "key", "last", "listener", "session")

    def __init__(self, wire: Wire) -> None:
        self.session: Session | None = None
        self.key = ""
        self.last = b""
        self.listener: Callable[[bytes], None] | None = None
        self.end: tuple[int, str] | None = None
        self._wire = wire

    def bind(self, session: Session | None) -> None:
        self.session = session

    def names(self) -> Sequence[bytes]:
        return ()

    def write(self, frame: bytes, shared: bytes = b"") -> None:
        if self.end is None:
            self._wire.put(self, frame, shared)

    def take(self, message: bytes) -> None:
        self.last = message if len(message) <= self._wire.kept_bytes else b""
        if self.listener is not None:
            self.listener(message)

    def finish(self, code: int, message: str) -> None:
        self.end = (code, message)

    @property
    def backlog_bytes(self) -> int:
        return 0

    def frame(self) -> session_pb2.ServerFrame:
        return session_pb2.ServerFrame.FromString(self.last)


class Crowd:
    """`count` processes, on hosts of eight, and a clock that stands still until `tick`."""

    def __init__(self, count: int, *, kept_bytes: int = 1 << 30, **settings: Any) -> None:
        self.count = count
        self.now = 1.0
        self.wire = Wire(kept_bytes)
        machine = Machine(Config(count, 77, recoverable=True, **settings), 0.0)
        self.service = Service(machine, self.clock)
        self.streams = [CrowdStream(self.wire) for _ in range(count)]
        self._number = 0

    def clock(self) -> float:
        return self.now

    @property
    def machine(self) -> Machine:
        return self.service.machine

    def open_all(self) -> None:
        """Opens all Sessions, as they come within a second, and lets deltas be sent meanwhile."""
        each_s = 1.0 / self.count
        for process_id, stream in enumerate(self.streams):
            self.open(process_id, stream)
            self.now += each_s
            if self.service.next_due() <= self.now:
                self.tick()
            if process_id % 64 == 0:
                self.wire.deliver()
        self.wire.deliver()

    def open(self, process_id: int, stream: CrowdStream, host: str = "", life: int = 1) -> None:
        opening = session_pb2.Open(
            process_id=process_id,
            incarnation=(process_id * 0x9E3779B97F4A7C15 + life) % 2**64,
            host=host or f"host-{process_id // PROCESSES_PER_HOST:05d}",
            pid=10_000 + process_id,
        )
        frame = session_pb2.ClientFrame(open=opening).SerializeToString()
        self.service.stream_frame(stream, frame)
        self.service.flush()

    def call(self, process_id: int, method: str, message: Any = None, **fields: Any) -> None:
        """Makes a call as a process; its answer goes over the wire."""
        self._number += 1
        body = b"" if message is None else message.SerializeToString()
        request = session_pb2.Request(id=self._number, method=method, body=body, **fields)
        frame = session_pb2.ClientFrame(request=request).SerializeToString()
        self.service.stream_frame(self.streams[process_id], frame)
        self.service.flush()

    def call_all(
        self, method: str, message: Callable[[int], Any], who: Iterable[int] = (), **fields: Any
    ) -> None:
        for process_id in who or range(self.count):
            self.call(process_id, method, message(process_id), **fields)

    def gather(self) -> None:
        """Brings the job together: all Sessions are open, and have registered."""
        self.open_all()
        self.call_all("RegisterTask", lambda _: coordination_pb2.RegisterTaskRequest())
        self.settle()

    def barrier(self, name: str, who: Iterable[int] = (), timeout_s: float = 60.0) -> None:
        request = coordination_pb2.BarrierRequest(
            barrier_id=name, barrier_timeout_in_ms=int(timeout_s * 1000)
        )
        self.call_all("Barrier", lambda _: request, who)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.service.tick()
        self.service.flush()

    def settle(self) -> None:
        """Lets clients read, and deltas go out, until nothing is left to send."""
        self.wire.deliver()
        while self.service.sessions.next_due() < self.now + 10.0:
            self.tick(max(0.0, self.service.sessions.next_due() - self.now))
            self.wire.deliver()

    def replies(self) -> Iterator[session_pb2.Reply]:
        """Yields the last message of each process, a reply."""
        for stream in self.streams:
            yield stream.frame().reply

"""A TCP proxy before a service: it cuts connections, holds them, and refuses new ones, when a test
says so.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections to `target` ("host:port") from an address of its own. A context
    manager.
    """

    def __init__(self, target: str) -> None:
        self.retarget(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.refusing = False
        self.requested = 0  # bytes that have come from clients
        self._dropping: Collection[str] = ()
        self._moves = threading.Event()
        self._moves.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def retarget(self, target: str) -> None:
        """Forwards new connections to another service; to none, where it is ""."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port)) if port else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                incoming, _ = self._listener.accept()
                with self._lock:
                    outgoing = self._connect()
                    if outgoing is not None:
                        self._open |= {incoming, outgoing}
                if outgoing is None:
                    incoming.close()
                    continue
                for what, source, sink in (
                    ("requests", incoming, outgoing),
                    ("answers", outgoing, incoming),
                ):
                    threading.Thread(
                        target=self._forward, args=(what, source, sink), daemon=True
                    ).start()

    def _connect(self) -> socket.socket | None:
        """Returns a connection to the service, None where there is none to be had."""
        if self.refusing or self._target is None:
            return None
        try:
            return socket.create_connection(self._target)
        except OSError:
            return None

    def _forward(self, what: str, source: socket.socket, sink: socket.socket) -> None:
        has_lost = False  # no TCP brings what came after bytes that it has lost
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.requested += len(data) * (what == "requests")
                self._moves.wait()
                has_lost = has_lost or what in self._dropping
                if not has_lost:
                    sink.sendall(data)
        self._close(source, sink)

    def _close(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._lock:
            self._open.difference_update(sockets)

    def drop(self, *what: str) -> None:
        """Lets no "requests" and no "answers" through any more, or not those named; closes
        nothing.
        """
        self._dropping = what or ("requests", "answers")

    def vanish(self) -> None:
        """Lets nothing through any more and takes no new connections, as a host that is gone."""
        self.drop()
        self._listener.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Lets nothing through until `deliver`; what comes waits. Closes nothing."""
        self._moves.clear()

    def deliver(self) -> None:
        """Lets everything through again, what was held too, but on connections that have lost
        something.
        """
        self._dropping = ()
        self._moves.set()

    def cut(self, refuse: bool = False) -> None:
        """Closes all connections; new ones are refused until the next `cut()`, where `refuse` says
        so.
        """
        with self._lock:
            self.refusing = refuse
            sockets = list(self._open)
        self._close(*sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.cut(refuse=True)
        self._moves.set()


def _as_partial(answer: bytes) -> bytes:
    """Returns the head of an answer with the status of a range: rclone sends ranges with 200."""
    if b"\r\nContent-Range:" in answer:
        return answer.replace(b" 200 OK", b" 206 Partial Content", 1)
    return answer


class SlowProxy(Proxy):
    """A proxy whose answers begin `delay_s` after their request. A context manager.

    `connections` counts those that got to their answer number `stall_at`; `stalls` says of such a
    number, from 1 on, whether that connection stands still for `stall_s` before this answer.
    """

    def __init__(
        self,
        target: str,
        *,
        delay_s: float = 0.0,
        stall_s: float = 30.0,
        stall_at: int = 1,
        stalls: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._delay_s = delay_s
        self._stall_s = stall_s
        self._stall_at = stall_at
        self.stalls = stalls
        self.connections = 0
        self.stalled = 0
        self._asked: set[socket.socket] = set()
        self._ended = threading.Event()
        super().__init__(target)

    def _forward(self, what: str, source: socket.socket, sink: socket.socket) -> None:
        if what == "answers":
            self._answer(source, sink)
            return
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self._asked.add(sink)
                sink.sendall(data)
        self._close(source, sink)

    def _answer(self, source: socket.socket, sink: socket.socket) -> None:
        answers = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if source in self._asked:
                    self._asked.discard(source)
                    answers += 1
                    self._ended.wait(self._delay_s)
                    if answers == self._stall_at and self._is_stalling():
                        self._ended.wait(self._stall_s)
                    data = _as_partial(data)
                sink.sendall(data)
        self._close(source, sink)

    def _is_stalling(self) -> bool:
        with self._lock:
            self.connections += 1
            is_stalling = self.stalls(self.connections)
            self.stalled += is_stalling
        return is_stalling

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        super().__exit__(kind, error, trace)


_ADDRESS = r"127\.0\.0\.1:\d+"


def address_of(query: str) -> str:
    """Returns the address in what a URL needs to reach a server."""
    found = re.search(_ADDRESS, query)
    assert found is not None
    return found[0]


def through(proxy: Proxy, query: str) -> str:
    """Returns what a URL needs to reach a server through a proxy."""
    return re.sub(_ADDRESS, proxy.address, query)

"""A TCP proxy before a service: it cuts connections, and refuses new ones, when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections to `target` ("host:port") from an address of its own. A context
    manager.
    """

    def __init__(self, target: str) -> None:
        self._target = target.rsplit(":", 1)[0], int(target.rsplit(":", 1)[1])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.refusing = self._dropping = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                incoming, _ = self._listener.accept()
                with self._lock:
                    outgoing = None if self.refusing else socket.create_connection(self._target)
                    if outgoing is not None:
                        self._open |= {incoming, outgoing}
                if outgoing is None:
                    incoming.close()
                    continue
                for source, sink in ((incoming, outgoing), (outgoing, incoming)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if not self._dropping:
                    sink.sendall(data)
        self._close(source, sink)

    def _close(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._lock:
            self._open.difference_update(sockets)

    def drop(self) -> None:
        """Lets nothing through any more, in either direction, and closes nothing."""
        self._dropping = True

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

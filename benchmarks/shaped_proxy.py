"""A proxy that makes loopback as slow as the way to an object store.

    python benchmarks/shaped_proxy.py PORT [--delay-ms 20] [--connection-mb 60] [--link-mb 400]

The first byte of each answer comes at least `delay-ms` after the last byte of its request. Each
connection moves `connection-mb` million bytes a second, and all of them together `link-mb`, both
ways counted in one. Bodies go by splice, so that no byte comes into Python.

It prints its address, and serves until its input ends. `GET /-/requests` answers, at once, how many
requests of each kind it has forwarded, and `GET /-/bytes` how many bytes of bodies to its clients.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import socket
import sys
import threading
import time
from urllib.parse import parse_qs, urlsplit

from http_by_splice import Connection, Head, Pipe

PIECE_BYTES = 256 << 10
LAG_S = 0.02  # a sleep that was too long is made up for, so much of it at most
REQUESTS_PATH = "/-/requests"
BYTES_PATH = "/-/bytes"


class Bucket:
    """Lets bytes pass at a rate. Thread-safe."""

    def __init__(self, bytes_a_second: float) -> None:
        self._rate = bytes_a_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, count: int) -> float:
        """Returns when so many bytes may pass, by the monotonic clock."""
        with self._lock:
            begin = max(self._free_at, time.monotonic() - LAG_S)
            self._free_at = begin + count / self._rate
            return self._free_at


class ShapedProxy:
    """Serves connections, each on a thread of its own."""

    def __init__(self, port: int, delay_s: float, connection_rate: float, link_rate: float) -> None:
        self._target = ("127.0.0.1", port)
        self._delay_s = delay_s
        self._connection_rate = connection_rate
        self._link = Bucket(link_rate)
        self._requests: collections.Counter[str] = collections.Counter()
        self._answered_bytes = 0
        self._lock = threading.Lock()

    def serve(self, client: socket.socket) -> None:
        """Forwards one connection until either side ends it."""
        with client, socket.create_connection(self._target) as target, Pipe() as pipe:
            with contextlib.suppress(ConnectionError):
                self._forward(Connection(client), Connection(target), pipe)

    def _forward(self, client: Connection, target: Connection, pipe: Pipe) -> None:
        own = Bucket(self._connection_rate)
        while (request := client.head()) is not None:
            if request.target == REQUESTS_PATH:
                client.answer(200, json.dumps(self._requests).encode())
                continue
            if request.target == BYTES_PATH:
                client.answer(200, json.dumps(self._answered_bytes).encode())
                continue
            with self._lock:
                self._requests[kind_of(request)] += 1
            target.send(request.raw)
            if request.expects_continue:
                self._answer(client, target, time.monotonic())
            self._body(client, target, request.length, pipe, own)
            answer = self._answer(client, target, time.monotonic())
            length = 0 if request.method == "HEAD" else answer.length
            with self._lock:
                self._answered_bytes += length
            self._body(target, client, length, pipe, own)

    def _answer(self, client: Connection, target: Connection, asked: float) -> Head:
        answer = target.head()
        if answer is None:
            raise ConnectionResetError("the server has closed the connection")
        wait_until(asked + self._delay_s)
        client.send(answer.raw)
        return answer

    def _body(
        self, source: Connection, sink: Connection, length: int, pipe: Pipe, own: Bucket
    ) -> None:
        for begin in range(0, length, PIECE_BYTES):
            count = min(PIECE_BYTES, length - begin)
            wait_until(max(own.reserve(count), self._link.reserve(count)))
            pipe.move(source.fileno(), sink.fileno(), count)


def wait_until(moment: float) -> None:
    """Sleeps until a moment of the monotonic clock."""
    pause_s = moment - time.monotonic()
    if pause_s > 0:
        time.sleep(pause_s)


def kind_of(request: Head) -> str:
    """Returns what a request is to S3, such as LIST or PUT of a part."""
    url = urlsplit(request.target)
    query = parse_qs(url.query, keep_blank_values=True)
    if "list-type" in query:
        return "LIST"
    if "partNumber" in query:
        return "PUT part"
    if "uploads" in query or "uploadId" in query:
        return "multipart"
    return "DELETE" if "delete" in query else request.method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--delay-ms", type=float, default=20)
    parser.add_argument("--connection-mb", type=float, default=60)
    parser.add_argument("--link-mb", type=float, default=400)
    chosen = parser.parse_args()
    proxy = ShapedProxy(
        chosen.port,
        chosen.delay_ms / 1e3,
        chosen.connection_mb * 1e6,
        chosen.link_mb * 1e6,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()

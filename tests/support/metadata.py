"""A metadata server that answers as Google Compute Engine's does, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata(ThreadingHTTPServer):
    """Serves `values`; `address` is host:port. A request without Google's header gets 403, as
    there.

    A client with `address/NAME` as its host is a machine of its own: its values are
    `NAME/preempted` and so on, where they are set.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.address = f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        machine, known, key = self.path.strip("/").rpartition("computeMetadata/v1/instance/")
        known = known and self.headers.get("Metadata-Flavor") == "Google"
        body = self.server.values.get(machine + key, self.server.values.get(key, "")).encode()
        self.send_response(200 if known and body else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


@contextmanager
def metadata_server() -> Iterator[Metadata]:
    """Serves until the block ends."""
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()

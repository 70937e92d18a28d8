"""Object stores for tests: real servers over HTTP on loopback, in threads of this process."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Iterator

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Runs moto's S3, which honours conditions; gives the query that a URL needs to reach it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        with _environment(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_EC2_METADATA_DISABLED="true"):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            yield f"?endpoint=http://127.0.0.1:{port}&aws_region=us-east-1"
    finally:
        server.stop()


@contextlib.contextmanager
def gcs_server() -> Iterator[None]:
    """Runs gcp-storage-emulator, which ignores conditions; tensorstore finds it by its environment, read once: one a process."""
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        port = server._api._httpd.socket.getsockname()[1]
        with _environment(TENSORSTORE_GCS_HTTP_URL=f"http://127.0.0.1:{port}", GOOGLE_AUTH_TOKEN_FOR_TESTING="token"):
            yield
    finally:
        server.stop()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

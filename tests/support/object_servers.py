"""Object stores for tests: real servers over HTTP on loopback, in threads of this process."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import os
import re
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.storage.kvstore import KvStoreStorage
from holdfast.checkpoint.storage.path import register_storage
from tests.support.libraries import need_program
from tests.support.paths import ROOT

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server(
    *,
    ignored: Sequence[str] = (),
    requests: list[str] | None = None,
    around: Callable[[Any], Any] = lambda application: application,
) -> Iterator[str]:
    """Runs moto's S3, which honours conditions; gives the query that a URL needs to reach it.

    `ignored` are headers that it never sees, such as If-None-Match; `requests` takes method and
    path of each request. `around` puts another WSGI application before it.
    """
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    server._server.app = _past(
        around(server._server.app), ignored, requests if requests is not None else []
    )
    try:
        _, port = server.get_host_and_port()
        with _environment(
            AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_EC2_METADATA_DISABLED="true"
        ):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()
            yield f"?endpoint=http://127.0.0.1:{port}&aws_region=us-east-1"
    finally:
        server.stop()


def _past(
    app: Any, ignored: Sequence[str], requests: list[str]
) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """Returns a WSGI application in front of another: it notes requests, takes headers away, and
    makes one PUT at a time.

    moto looks at a condition and writes in two steps, where S3 takes one.
    """
    one_put = threading.Lock()

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        for name in ignored:
            environ.pop(f"HTTP_{name.upper().replace('-', '_')}", None)
        with one_put if environ["REQUEST_METHOD"] == "PUT" else contextlib.nullcontext():
            answer: Iterable[bytes] = app(environ, start_response)
        return answer

    return application


@contextlib.contextmanager
def small_s3_server(folder: Path) -> Iterator[str]:
    """Runs the S3 server of the benchmarks, which honours conditions and is fast, with its bodies
    in a folder; gives a URL's query.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "s3_server.py"), str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        with _environment(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test"):
            yield f"?endpoint={address}&region=us-east-1"
        process.stdin.close()


class TensorStoreMemory(KvStoreStorage):
    """tensorstore's own memory as a store, tensorstore://: it honours conditions, which the
    emulator of gs:// ignores, and has other libraries' arrays, which memory:// has not.
    """

    def __init__(self, url: str, *, single_writer: bool = False) -> None:
        memory = url.replace("tensorstore://", "memory://")
        super().__init__(memory, single_writer=single_writer)
        self.root = url.rstrip("/")

    @classmethod
    def register(cls) -> None:
        register_storage(
            "tensorstore", lambda url, single_writer: cls(url, single_writer=single_writer)
        )


def rclone_program() -> str:
    """Returns where rclone is: beside this Python, where its wheel puts it."""
    return str(Path(sysconfig.get_path("scripts")) / "rclone")


@contextlib.contextmanager
def rclone_server(folder: Path) -> Iterator[str]:
    """Runs rclone's S3, which ignores conditions, over a folder; gives a URL's query."""
    (folder / BUCKET).mkdir(exist_ok=True)
    command = [rclone_program(), "serve", "s3", str(folder), "--addr", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--auth-key", "test,secret"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            found = next(
                match
                for line in process.stderr
                if (match := re.search(r"(http://127\.0\.0\.1:\d+)", line))
            )
            drain = threading.Thread(target=process.stderr.read)
            drain.start()
            with _environment(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="secret"):
                yield f"?endpoint={found[1]}&region=us-east-1"
        finally:
            process.terminate()
        drain.join()


@contextlib.contextmanager
def gcs_server() -> Iterator[None]:
    """Runs gcp-storage-emulator, which ignores conditions; tensorstore finds it by its environment,
    read once: one a process.
    """
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        port = server._api._httpd.socket.getsockname()[1]
        with _environment(
            TENSORSTORE_GCS_HTTP_URL=f"http://127.0.0.1:{port}",
            GOOGLE_AUTH_TOKEN_FOR_TESTING="token",
        ):
            yield
    finally:
        server.stop()


_AZURITE = "azurite-blob"  # of npm's package azurite
_AZURITE_ACCOUNT = (  # and its key, which Azurite's documentation gives for everybody
    "devstoreaccount1"
)
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def azurite_program() -> str:
    """Returns where Azurite is. Without it the test is skipped; in CI it fails."""
    installed = ROOT / "build" / "azurite" / "node_modules" / ".bin" / _AZURITE
    return need_program(_AZURITE, installed, "scripts/install_system_packages.sh")


@contextlib.contextmanager
def azure_server() -> Iterator[str]:
    """Runs Azurite, Microsoft's emulator of Azure's blobs, which honours conditions; gives the
    query that a URL needs to reach it.
    """
    command = [
        azurite_program(),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    with subprocess.Popen(
        [*command, "--disableTelemetry"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            found = next(
                match
                for line in process.stdout
                if (match := re.search(r"listens on (http://[0-9.:]+)", line))
            )
            drain = threading.Thread(target=process.stdout.read)
            drain.start()
            with _environment(AZURITE_BLOB_STORAGE_URL=found[1]):
                _make_container(found[1])
                yield "?use_emulator=true"
        finally:
            process.terminate()
        drain.join()


def _make_container(url: str) -> None:
    """Makes the container BUCKET, by a request that is signed with the account's key."""
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = (
        "PUT"
        + "\n" * 12
        + lines
        + f"/{_AZURITE_ACCOUNT}/{_AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    )
    signed = base64.b64encode(
        hmac.new(base64.b64decode(_AZURITE_KEY), text.encode(), hashlib.sha256).digest()
    ).decode()
    headers |= {"Authorization": f"SharedKey {_AZURITE_ACCOUNT}:{signed}", "Content-Length": "0"}
    request = urllib.request.Request(
        f"{url}/{_AZURITE_ACCOUNT}/{BUCKET}?restype=container", method="PUT", headers=headers
    )
    urllib.request.urlopen(request, timeout=30).close()


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

"""`holdfast web` as a process, and a coordinator with simulated processes for it to show."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from holdfast.coordination import CoordinationClient, CoordinationService
from tests.support.libraries import need

HOLDFAST = [sys.executable, "-c", "from holdfast.cli import main; main()"]


@contextmanager
def page(*arguments: str) -> Iterator[str]:
    """Runs `holdfast web`; yields the URL that it prints."""
    command = [*HOLDFAST, "web", *arguments, "--end-with-input"]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdin is not None and popen.stdout is not None
    line = popen.stdout.readline()
    assert line.startswith("page at http://127.0.0.1:"), line
    try:
        yield line.removeprefix("page at ").strip()
    finally:
        popen.stdin.close()
        try:
            assert popen.wait(30) == 0
        finally:
            popen.kill()
            popen.stdout.close()


def fetch(url: str, **headers: str) -> tuple[int, str, Any]:
    """Returns the status, the text and the headers of an answer."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=60
        ) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


@contextmanager
def snapshots(url: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Yields the snapshots of a page, as a viewer gets them."""
    with urllib.request.urlopen(f"{url}events", timeout=60) as answer:
        yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))


@contextmanager
def not_reading(url: str) -> Iterator[None]:
    """Keeps a viewer who asks for snapshots and reads none."""
    parts = urlsplit(url)
    with socket.socket() as viewer:
        viewer.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 1024
        )  # before it connects: else the kernel offers more
        viewer.connect((parts.hostname, parts.port))
        viewer.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        yield


@contextmanager
def processes(
    service: CoordinationService, count: int, host: str = "b{}"
) -> Iterator[list[CoordinationClient]]:
    """Connects clients as the processes of a job."""
    clients = [
        CoordinationClient(service.address, number, host=host.format(number))
        for number in range(count)
    ]
    threads = [threading.Thread(target=client.connect) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with ExitStack() as stack:
        for client in clients:
            stack.callback(client.close)
        yield clients


def serious_faults(tab: Any) -> list[tuple[str, str]]:
    """Returns what axe finds in a tab that keeps people out, each with its first place; skips
    without axe.
    """
    axe = need("axe_playwright_python.sync_playwright", "make slow-libraries")
    found = axe.Axe().run(tab).response["violations"]
    return [
        (each["id"], each["nodes"][0]["html"][:100])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]

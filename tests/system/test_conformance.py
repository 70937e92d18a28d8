"""Our service, whoever's client asks, gives the answers of jaxlib's to the same calls."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.coordination import CoordinationService, ServiceTimeouts
from tests.support.paths import SUPPORT, program

SCRIPT = SUPPORT / "conformance_script.py"
JAXLIB_SERVICE = program("conformance_jaxlib_service")


@contextlib.contextmanager
def serving(service: str, mode: str) -> Iterator[str]:
    """Runs one of the two services in a process of its own and yields its address."""
    heartbeat_s = 10 if mode == "recoverable" else 60
    if service == "holdfast":
        with CoordinationService.spawn(
            3,
            timeouts=ServiceTimeouts(heartbeat_s=heartbeat_s, shutdown_s=10),
            recoverable=mode == "recoverable",
        ) as spawned:
            yield spawned.address
        return
    command = [sys.executable, str(JAXLIB_SERVICE), mode, str(heartbeat_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("coordinator at ").strip()
        finally:
            process.kill()


@functools.cache
def outcomes(client: str, service: str, mode: str) -> dict[str, list[object]]:
    """Runs the script and returns {name: [status, value]}."""
    with serving(service, mode) as address:
        command = [sys.executable, str(SCRIPT), client, address, mode]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len({name for name, _, _ in lines}) == len(lines), "two outcomes of one name"
    return {name: rest for name, *rest in lines}


@pytest.mark.parametrize(
    ("mode", "client"),
    [
        ("strict", "jaxlib"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("strict", "holdfast"),
                ("recoverable", "jaxlib"),
                ("recoverable", "holdfast"),
            )
        ),
    ],
)
def test_our_service_answers_as_jaxlibs(client: str, mode: str) -> None:
    """At least 90 outcomes of every method and documented error, from our service to jaxlib's
    client or to ours, have the status and value that jaxlib's service gives jaxlib's client.
    """
    theirs = outcomes("jaxlib", "jaxlib", mode)
    ours = outcomes(client, "holdfast", mode)
    assert ours == theirs
    assert len(ours) >= 90
